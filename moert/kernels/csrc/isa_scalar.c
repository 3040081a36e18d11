/* The kernels in plain C. */
#include "target.h"

static int runs(void) { return 1; }

#include "simd_scalar.h"

#define TABLE moert_scalar
#define NAME "scalar"
#include "kernels.inc"
