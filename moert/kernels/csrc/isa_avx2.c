/* The kernels for AVX2 (Haswell, Zen and later). */
#ifdef __x86_64__
#include "target.h"

static int runs(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
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
