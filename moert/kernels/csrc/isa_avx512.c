/* The kernels for AVX-512 with VNNI (Ice Lake, Zen 4 and later). */
#ifdef __x86_64__
#include "target.h"

static int runs(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx2");
}

TARGET("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#include "simd_avx512.h"

#define TABLE moert_avx512
#define NAME "avx512"
#include "kernels.inc"
END_TARGET
#else
typedef int another_processor;
#endif
