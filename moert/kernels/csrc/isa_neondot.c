/* The kernels for ARM with dot products (ARMv8.2 and later: Raspberry Pi 5, Apple, Graviton 2). */
#if defined(__aarch64__)
#include "target.h"

#ifdef __linux__
#include <sys/auxv.h>
static int runs(void) { return getauxval(AT_HWCAP) >> 20 & 1; } /* asimddp */
#elif defined(__APPLE__)
static int runs(void) { return 1; } /* every Mac with such a processor has it */
#else
static int runs(void) { return 0; } /* not known: isa_neon.c runs everywhere */
#endif

#ifdef __clang__
TARGET("dotprod")
#else
TARGET("arch=armv8.2-a+dotprod")
#endif
#define DOT_PRODUCT
#include "simd_neon.h"

#define TABLE moert_neondot
#define NAME "neondot"
#include "kernels.inc"
END_TARGET
#else
typedef int another_processor;
#endif
