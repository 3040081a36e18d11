/* The kernels for AVX-512 with VNNI and VBMI (Ice Lake, Zen 4 and later): bytes of a whole vector are looked up at once. */
#ifdef __x86_64__
#include "target.h"
#include "x86.h"

static int runs(void) { return x86_avx512(X86_WIDEST) && (x86_ask(7, 0).c & X86_VBMI); }

TARGET("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")
#define VBMI
#include "simd_avx512.h"

#define TABLE moert_avx512vbmi
#define NAME "avx512vbmi"
#include "kernels.inc"
END_TARGET
#else
typedef int another_processor;
#endif
