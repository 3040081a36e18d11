/* The kernels for AVX2 (Haswell, Zen and later). */
#ifdef __x86_64__
#include "target.h"
#include "x86.h"

static int runs(void) { return x86_avx2(); }

TARGET("avx2,fma,f16c")
#include "simd_avx2.h"

#define TABLE moert_avx2
#define NAME "avx2"
#include "kernels.inc"
END_TARGET
#else
typedef int another_processor;
#endif
