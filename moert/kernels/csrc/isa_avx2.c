/* The kernels for AVX2 (Haswell, Zen and later). */
#ifdef __x86_64__
#include "target.h"

#include <cpuid.h>

static int runs(void) {
    unsigned a, b, c, d;
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1); /* f16c, which older compilers have no name for */
}

TARGET("avx2,fma,f16c")
#include "simd_avx2.h"

#define TABLE moert_avx2
#define NAME "avx2"
#include "kernels.inc"
END_TARGET
#else
typedef int another_processor;
#endif
