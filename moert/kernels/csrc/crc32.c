/* The CRC-32 of zlib and of packs: polynomial 0xEDB88320, bits reflected.
 *
 * A message is a polynomial, its checksum the rest of a division. A piece of 128 bits that lies `distance` bits ahead of
 * another may be added to that one, after its halves were multiplied with what x^distance leaves: so four pieces side by side
 * run through a message, and 16 bytes are left that have the checksum of all. (Gopal and others, "Fast CRC Computation for
 * Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009.) */
#include <string.h>

#include "crc32.h"
#include "moert.h"
#include "target.h"

#define WIDE 1024 /* bytes from which on the longer steps are quicker */

/* Byte by byte, four bits at a time. `crc` is as it is between bytes, not inverted. */
static uint32_t bytewise(uint32_t crc, const uint8_t *at, int64_t n) {
    static const uint32_t nibbles[16] = {
        0x00000000, 0x1DB71064, 0x3B6E20C8, 0x26D930AC, 0x76DC4190, 0x6B6B51F4, 0x4DB26158, 0x5005713C,
        0xEDB88320, 0xF00F9344, 0xD6D6A3E8, 0xCB61B38C, 0x9B64C2B0, 0x86D3D2D4, 0xA00AE278, 0xBDBDF21C,
    };
    for (; n > 0; n--) {
        crc ^= *at++;
        crc = crc >> 4 ^ nibbles[crc & 15];
        crc = crc >> 4 ^ nibbles[crc & 15];
    }
    return crc;
}

#if defined(__x86_64__)
#include <immintrin.h>

#include "x86.h"

enum { BYTEWISE, FOLDS, FOLDS_WIDE };

/* Which of these the processor can. Asking it takes longer than a short message. */
static int folds(void) {
    static _Atomic int found = -1;
    if (found < 0) {
        int wide = x86_avx512(X86_WIDEST) && (x86_ask(7, 0).c & X86_VPCLMUL);
        found = (x86_ask(1, 0).c & X86_CRC) != X86_CRC ? BYTEWISE : wide ? FOLDS_WIDE : FOLDS;
    }
    return found;
}

TARGET("pclmul,sse4.1")
/* What x^(distance + 32) and x^(distance - 32) leave, reflected: for the halves of a piece. */
#define FOLD_512 _mm_set_epi64x(0x1C6E41596, 0x154442BD4)
#define FOLD_128 _mm_set_epi64x(0x0CCAA009E, 0x1751997D0)

INLINE __m128i folded(__m128i piece, __m128i by, __m128i onto) {
    return _mm_xor_si128(onto, _mm_xor_si128(_mm_clmulepi64_si128(piece, by, 0x00), _mm_clmulepi64_si128(piece, by, 0x11)));
}

static uint32_t fast(uint32_t crc, const uint8_t *at, int64_t n) {
    __m128i piece[4];
    uint8_t left[CRC32_PIECES];
    const uint8_t *first = at;
    int64_t taken = CRC32_PIECES;
    if (n < CRC32_PIECES) return bytewise(crc, at, n);
    if (n >= WIDE && folds() == FOLDS_WIDE) {
        taken = crc32_fold_wide(crc, at, n, left);
        crc = 0;
        first = left;
    }
    for (int i = 0; i < 4; i++) piece[i] = _mm_loadu_si128((const void *)(first + 16 * i));
    piece[0] = _mm_xor_si128(piece[0], _mm_cvtsi32_si128((int)crc));
    for (at += taken, n -= taken; n >= 64; at += 64, n -= 64)
        for (int i = 0; i < 4; i++) piece[i] = folded(piece[i], FOLD_512, _mm_loadu_si128((const void *)(at + 16 * i)));
    for (int i = 1; i < 4; i++) piece[i] = folded(piece[i - 1], FOLD_128, piece[i]);
    for (; n >= 16; at += 16, n -= 16) piece[3] = folded(piece[3], FOLD_128, _mm_loadu_si128((const void *)at));
    _mm_storeu_si128((void *)left, piece[3]);
    return bytewise(bytewise(0, left, 16), at, n);
}
END_TARGET

#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>

static int folds(void) { return getauxval(AT_HWCAP) >> 7 & 1; } /* crc32 */

static uint32_t fast(uint32_t crc, const uint8_t *at, int64_t n) {
    for (; n >= 8; at += 8, n -= 8) {
        uint64_t word;
        memcpy(&word, at, sizeof word);
        __asm__(".arch_extension crc\n\tcrc32x %w0, %w0, %1" : "+r"(crc) : "r"(word));
    }
    return bytewise(crc, at, n);
}

#else
static int folds(void) { return 0; }
#define fast bytewise
#endif

int moert_crc32_fast(void) { return folds() != 0; }
uint32_t moert_crc32(uint32_t crc, const void *data, int64_t n) {
    return ~(folds() ? fast(~crc, data, n) : bytewise(~crc, data, n));
}
