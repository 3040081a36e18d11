/* The instruction sets of this library, best first. */
#include "internal.h"

extern const operations moert_amx, moert_avx512vbmi, moert_avx512, moert_avx2vnni, moert_avx2, moert_neondot, moert_neon, moert_scalar;

const operations *const moert_isas[] = {
#ifdef __x86_64__
#if defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
    &moert_amx,
#endif
    &moert_avx512vbmi,
    &moert_avx512,
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
    &moert_avx2vnni,
#endif
    &moert_avx2,
#endif
#ifdef __aarch64__
    &moert_neondot,
    &moert_neon,
#endif
    &moert_scalar,
};
const int moert_isas_count = sizeof moert_isas / sizeof *moert_isas;

int moert_abi(void) { return MOERT_ABI; }
int moert_block(int cols, int group) { return block_of(cols, group); }
int moert_isa_count(void) { return moert_isas_count; }
const char *moert_isa_name(int isa) { return isa < 0 || isa >= moert_isas_count ? "" : moert_isas[isa]->name; }
void moert_code_inputs(int isa, const moert_feedback *block) { moert_isas[isa]->feedback(block); }
int moert_code_pairs(int isa, const moert_trellis *block) { return moert_isas[isa]->viterbi(block); }
int moert_isa_runs(int isa) { return isa >= 0 && isa < moert_isas_count && moert_isas[isa]->runs(); }
