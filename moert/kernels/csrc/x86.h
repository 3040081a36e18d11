/* What an x86-64 processor offers and its system lets programs use: CPUID and XGETBV (Intel's manual, volume 1, chapter 14).
 * The compilers' own __builtin_cpu_supports reads what some C libraries never fill in. */
#include <cpuid.h>

#define BIT(number) (1u << (number))
#define X86_CRC (BIT(1) | BIT(19))                                   /* leaf 1, ecx: pclmulqdq, sse4.1 */
#define X86_AVX (BIT(12) | BIT(27) | BIT(28) | BIT(29))              /* fma, osxsave, avx, f16c */
#define X86_AVX2 BIT(5)                                              /* leaf 7, ebx */
#define X86_AVX512 (BIT(5) | BIT(16) | BIT(17) | BIT(30) | BIT(31))  /* avx2, avx512f, dq, bw, vl */
#define X86_VNNI BIT(11)                                             /* leaf 7, ecx */
#define X86_VBMI BIT(1)
#define X86_VPCLMUL BIT(10)
#define X86_TILES (BIT(24) | BIT(25))                                /* leaf 7, edx: amx-tile, amx-int8 */
#define X86_AVXVNNI BIT(4)                                           /* leaf 7.1, eax */
#define X86_WIDE 0x06u                                               /* registers that the system saves: xmm, ymm */
#define X86_WIDEST 0xE6u                                             /* and masks and zmm */
#define X86_TILED 0x600E6u                                           /* and tiles */

/* Registers eax, ebx, ecx, edx of a leaf; all 0 where there is none. */
typedef struct {
    unsigned a, b, c, d;
} x86_leaf;

static inline x86_leaf x86_ask(unsigned leaf, unsigned part) {
    x86_leaf found = {0, 0, 0, 0};
    __get_cpuid_count(leaf, part, &found.a, &found.b, &found.c, &found.d);
    return found;
}

/* Whether the system saves these registers, where the processor has AVX at all. */
static inline int x86_avx(unsigned registers) {
    unsigned low, high;
    if ((x86_ask(1, 0).c & X86_AVX) != X86_AVX) return 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & registers) == registers;
}

static inline int x86_avx2(void) { return x86_avx(X86_WIDE) && (x86_ask(7, 0).b & X86_AVX2); }

static inline int x86_avx512(unsigned registers) {
    x86_leaf found = x86_ask(7, 0);
    return x86_avx(registers) && (found.b & X86_AVX512) == X86_AVX512 && (found.c & X86_VNNI);
}
