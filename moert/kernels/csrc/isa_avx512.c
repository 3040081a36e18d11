/* The kernels for AVX-512 with VNNI (Cascade Lake and later). */
#ifdef __x86_64__
#include "target.h"
#include "x86.h"

static int runs(void) { return x86_avx512(X86_WIDEST); }

TARGET("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#include "simd_avx512.h"

#define TABLE moert_avx512
#define NAME "avx512"
#include "kernels.inc"
END_TARGET
#else
typedef int another_processor;
#endif
