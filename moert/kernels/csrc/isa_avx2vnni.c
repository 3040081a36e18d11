/* The kernels for AVX2 with AVX-VNNI (Alder Lake, Zen 5 and later), where the compiler knows it. */
#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#include "target.h"

#include <cpuid.h>

static int runs(void) {
    unsigned a, b, c, d;
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 29 & 1)) return 0; /* f16c */
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}

TARGET("avx2,fma,f16c,avxvnni")
#define DOT_PRODUCT
#include "simd_avx2.h"

#define TABLE moert_avx2vnni
#define NAME "avx2vnni"
#include "kernels.inc"
END_TARGET
#else
typedef int another_processor;
#endif
