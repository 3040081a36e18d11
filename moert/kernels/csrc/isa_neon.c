/* The kernels for any 64-bit ARM (Raspberry Pi 3 and 4). */
#if defined(__aarch64__)
#include "target.h"

static int runs(void) { return 1; }

#include "simd_neon.h"

#define TABLE moert_neon
#define NAME "neon"
#include "kernels.inc"
#else
typedef int another_processor;
#endif
