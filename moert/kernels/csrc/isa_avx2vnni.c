/* The kernels for AVX2 with AVX-VNNI (Alder Lake, Zen 5 and later), where the compiler knows it. */
#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#include "target.h"
#include "x86.h"

static int runs(void) { return x86_avx2() && (x86_ask(7, 1).a & X86_AVXVNNI); }

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
