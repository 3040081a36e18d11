/* The kernels for AVX-512 with VNNI and AMX (Sapphire Rapids and later), where the compiler and the system know it: many
 * tokens are multiplied a tile at a time. */
#if defined(__x86_64__) && defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#include "target.h"
#include "x86.h"

#include <sys/syscall.h>
#include <unistd.h>

#define REQUEST_PERMISSION 0x1023 /* ARCH_REQ_XCOMP_PERM */
#define TILE_DATA 18

/* Linux lets a process use tiles after it has asked for them. */
static int runs(void) {
    if (!x86_avx512(X86_TILED) || !(x86_ask(7, 0).c & X86_VBMI) || (x86_ask(7, 0).d & X86_TILES) != X86_TILES) return 0;
    return !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
}

TARGET("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,amx-tile,amx-int8")
#define VBMI
#include "simd_avx512.h"
#include "simd_amx.h"

#define TABLE moert_amx
#define NAME "amx"
#include "kernels.inc"
END_TARGET
#else
typedef int another_processor;
#endif
