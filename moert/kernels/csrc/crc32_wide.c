/* crc32.c's folding, with four times as much in each step. */
#if defined(__x86_64__)
#include <immintrin.h>

#include "crc32.h"
#include "target.h"

TARGET("avx512f,vpclmulqdq,pclmul")
/* What x^(distance + 32) and x^(distance - 32) leave, reflected: for the halves of a piece. */
#define FOLD_2048 _mm512_set4_epi64(0x1322D1430, 0x11542778A, 0x1322D1430, 0x11542778A)
#define FOLD_512 _mm512_set4_epi64(0x1C6E41596, 0x154442BD4, 0x1C6E41596, 0x154442BD4)

INLINE __m512i folded(__m512i piece, __m512i by, __m512i onto) {
    __m512i low = _mm512_clmulepi64_epi128(piece, by, 0x00), high = _mm512_clmulepi64_epi128(piece, by, 0x11);
    return _mm512_ternarylogic_epi64(low, high, onto, 0x96); /* the sum of all three */
}

int64_t crc32_fold_wide(uint32_t crc, const uint8_t *at, int64_t n, uint8_t *left) {
    const uint8_t *start = at;
    __m512i piece[4];
    for (int i = 0; i < 4; i++) piece[i] = _mm512_loadu_si512(at + 64 * i);
    piece[0] = _mm512_xor_si512(piece[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc)));
    for (at += 256, n -= 256; n >= 256; at += 256, n -= 256)
        for (int i = 0; i < 4; i++) piece[i] = folded(piece[i], FOLD_2048, _mm512_loadu_si512(at + 64 * i));
    for (int i = 1; i < 4; i++) piece[i] = folded(piece[i - 1], FOLD_512, piece[i]);
    _mm512_storeu_si512(left, piece[3]);
    return at - start;
}
END_TARGET
#else
typedef int crc32_wide_needs_x86; /* C has no empty files */
#endif
