/* 64 bytes at a time: AVX-512 with VNNI. */
#include <immintrin.h>
#include <string.h>

#include "internal.h"

#define VECTOR 64
#define LANES 16
#define ONE_ROWS(bits) ((bits) < 4 ? 4 : 1) /* of a tile, for one token: wide codes are read in their own order */
#define MANY_ROWS 4
#define MANY_TOKENS 4
#define TILED(bits) 0 /* few.inc is for more tokens */
#define TRELLIS_TOKENS 4
#define FEW_TOKENS 4
#define FEW_VECTORS 2
#define FEW(bits) ((bits) == 2 || (bits) == 8 ? 3 : 2)
#define SCORE_VECTORS 4
#define DELTA_VECTORS 8
#define SCAN_ROWS 4
#define STRIP_ROWS 4
#define STRIP_VECTORS 2
#define MANY(bits) 44
#define SAME_WIDTHS 0x13C /* strips: the code for 2 bits is that for all */

typedef __m512i bytes;
typedef __m512i ints;
typedef __m512 reals;

INLINE bytes load_bytes(const void *p) { return _mm512_loadu_si512(p); }
INLINE bytes nibbles_low(bytes v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
INLINE bytes nibbles_high(bytes v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
INLINE bytes pairs(bytes v, const int place) {
    return _mm512_and_si512(_mm512_srli_epi16(v, 2 * place), _mm512_set1_epi8(3));
}

/* 32 bytes of high bits → byte 2k has the low half of byte k, byte 2k + 1 the high half. */
INLINE bytes load_high(const void *p) {
    bytes wide = _mm512_cvtepu8_epi16(_mm256_loadu_si256(p));
    return _mm512_or_si512(wide, _mm512_slli_epi16(wide, 4));
}

/* Two low bits from v, the third from high, for the inputs at `place` of each byte. */
INLINE bytes triples(bytes v, bytes high, const int place) {
    bytes third = place < 2 ? _mm512_slli_epi16(high, 2 - place) : _mm512_srli_epi16(high, place - 2);
    return _mm512_or_si512(pairs(v, place), _mm512_and_si512(third, _mm512_set1_epi8(4)));
}

/* Sums of 4 products of n vectors in each lane; codes below 16. */
INLINE ints dot_small(const int n, const bytes *codes, const int8_t *x) {
    ints sum = _mm512_setzero_si512();
    for (int i = 0; i < n; i++) sum = _mm512_dpbusd_epi32(sum, codes[i], _mm512_loadu_si512(x + i * VECTOR));
    return sum;
}
INLINE ints dot_bytes(const int n, const bytes *codes, const int8_t *x) { return dot_small(n, codes, x); }

/* Bytes → a byte for each code, in the order of the inputs. */
INLINE bytes spread_nibbles(const void *p) {
    const __m512i v = _mm512_cvtepu8_epi16(_mm256_loadu_si256(p));
    return _mm512_and_si512(_mm512_or_si512(v, _mm512_slli_epi16(v, 4)), _mm512_set1_epi8(15));
}
INLINE bytes spread_pairs(const void *p) {
    __m512i v = _mm512_cvtepu8_epi32(_mm_loadu_si128(p));
    v = _mm512_or_si512(v, _mm512_slli_epi32(v, 6));
    return _mm512_and_si512(_mm512_or_si512(v, _mm512_slli_epi32(v, 12)), _mm512_set1_epi8(3));
}
/* The third bits of VECTOR codes, where they belong. */
INLINE bytes spread_thirds(const void *p) {
    uint64_t bits;
    memcpy(&bits, p, sizeof bits);
    return _mm512_maskz_set1_epi8(bits, 4);
}
INLINE bytes look_up(const uint8_t *table, bytes v) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const void *)table)), v);
}
INLINE bytes or_bytes(bytes a, bytes b) { return _mm512_or_si512(a, b); }
INLINE void store_bytes(void *p, bytes v) { _mm512_storeu_si512(p, v); }
INLINE void store_parts(void *first, void *second, bytes v) {
    _mm256_storeu_si256(first, _mm512_castsi512_si256(v));
    _mm256_storeu_si256(second, _mm512_extracti64x4_epi64(v, 1));
}

/* Running sums of 4 products in each lane, a token in each. */
typedef __m512i dots;
INLINE bytes four_codes(const int bits, const uint8_t *p) {
    int32_t codes;
    memcpy(&codes, p, sizeof codes);
    (void)bits;
    return _mm512_set1_epi32(codes);
}
INLINE dots no_dots(void) { return _mm512_setzero_si512(); }
INLINE dots more_dots(const int bits, dots sum, bytes codes, bytes x) {
    (void)bits;
    return _mm512_dpbusd_epi32(sum, codes, x);
}
INLINE ints all_dots(const int bits, dots sum, dots inputs) {
    (void)bits, (void)inputs;
    return sum;
}

/* Trellis codes (trellis.inc): windows of 12 bits, 16 bits apart in the vector and `step` apart in memory. */
#ifdef VBMI
INLINE bytes load_windows(const int step, const window_places *at, const uint8_t *p) {
    (void)step;
    const bytes words = _mm512_permutexvar_epi8(load_bytes(at->from), load_bytes(p));
    return _mm512_and_si512(_mm512_multishift_epi64_epi8(load_bytes(at->shifts), words), _mm512_set1_epi16(0xFFF));
}
#else
INLINE bytes load_windows(const int step, const window_places *at, const uint8_t *p) {
    (void)step;
    const bytes v = _mm512_permutexvar_epi16(load_bytes(at->words), load_bytes(p));
    const bytes even = _mm512_srlv_epi32(_mm512_shuffle_epi8(v, load_bytes(at->even)), load_bytes(at->down));
    const bytes odd = _mm512_sllv_epi32(_mm512_shuffle_epi8(v, load_bytes(at->odd)), load_bytes(at->up));
    return _mm512_and_si512(_mm512_mask_blend_epi16(0xAAAAAAAA, even, odd), _mm512_set1_epi16(0xFFF));
}
#endif
/* Of each 16 bits: the highest `bits` in the low byte, the next ones in the high one. */
#ifdef VBMI
INLINE bytes two_places(const int bits, bytes v) { /* higher bits of a place count for nothing */
    return _mm512_mask_blend_epi8(0xAAAAAAAAAAAAAAAA, _mm512_srli_epi16(v, 16 - bits), _mm512_slli_epi16(v, 2 * bits - 8));
}
INLINE bytes look_up_32(const uint8_t *table, bytes v) {
    return _mm512_permutexvar_epi8(v, _mm512_broadcast_i64x4(_mm256_loadu_si256((const void *)table)));
}
INLINE bytes look_up_64(const uint8_t *table, bytes v) { return _mm512_permutexvar_epi8(v, load_bytes(table)); }
#else
INLINE bytes two_places(const int bits, bytes v) {
    const bytes high = _mm512_and_si512(_mm512_slli_epi16(v, 2 * bits - 8), _mm512_set1_epi16((short)(((1 << bits) - 1) << 8)));
    return _mm512_or_si512(_mm512_srli_epi16(v, 16 - bits), high);
}
INLINE bytes look_up_32(const uint8_t *table, bytes v) {
    const __mmask64 second = _mm512_test_epi8_mask(v, _mm512_set1_epi8(16));
    return _mm512_mask_blend_epi8(second, look_up(table, v), look_up(table + 16, v));
}
INLINE bytes look_up_64(const uint8_t *table, bytes v) {
    const __mmask64 second = _mm512_test_epi8_mask(v, _mm512_set1_epi8(16)), upper = _mm512_test_epi8_mask(v, _mm512_set1_epi8(32));
    const bytes low = _mm512_mask_blend_epi8(second, look_up(table, v), look_up(table + 16, v));
    const bytes high = _mm512_mask_blend_epi8(second, look_up(table + 32, v), look_up(table + 48, v));
    return _mm512_mask_blend_epi8(upper, low, high);
}
#endif
INLINE bytes times_16(bytes v, int factor) { return _mm512_mullo_epi16(v, _mm512_set1_epi16((short)factor)); }
INLINE bytes zip_low(bytes a, bytes b) { return _mm512_unpacklo_epi16(a, b); }
INLINE bytes zip_high(bytes a, bytes b) { return _mm512_unpackhi_epi16(a, b); }
INLINE bytes four_inputs(const int8_t *x) { return _mm512_set1_epi32(*(const int32_t *)(const void *)x); }
INLINE bytes signed_codes(bytes v) { return v; }
INLINE ints plus_ints(ints a, ints b) { return _mm512_add_epi32(a, b); }

INLINE reals zero(void) { return _mm512_setzero_ps(); }
INLINE reals load_reals(const float *p) { return _mm512_loadu_ps(p); }
INLINE void store_reals(float *p, reals v) { _mm512_storeu_ps(p, v); }
INLINE reals to_reals(ints v) { return _mm512_cvtepi32_ps(v); }
INLINE reals times(reals a, reals b) { return _mm512_mul_ps(a, b); }
INLINE reals plus(reals a, reals b) { return _mm512_add_ps(a, b); }
INLINE reals multiply_add(reals a, reals b, reals c) { return _mm512_fmadd_ps(a, b, c); }
INLINE reals splat(float v) { return _mm512_set1_ps(v); }
/* Halves are added until one lane is left. */
INLINE float total(reals v) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
/* The sums of neighbours in each quarter: those of a, then those of b. */
INLINE ints add_pairs(ints a, ints b) {
    const __m512 x = _mm512_castsi512_ps(a), y = _mm512_castsi512_ps(b);
    return _mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(x, y, 0x88)), _mm512_castps_si512(_mm512_shuffle_ps(x, y, 0xDD)));
}
/* The sums of neighbouring quarters: those of a, then those of b. */
INLINE ints add_quarters(ints a, ints b) {
    return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xDD));
}
/* Lane i gets the sum of lanes i * n and following of n vectors that lie one behind the other. */
INLINE ints add_across(const int n, const ints *v) {
    if (n == 1) return v[0];
    if (n == 2) return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), add_pairs(v[0], v[1]));
    ints four[4];
    for (int i = 0; i < n / 4; i++) four[i] = add_pairs(add_pairs(v[4 * i], v[4 * i + 1]), add_pairs(v[4 * i + 2], v[4 * i + 3]));
    if (n == 4) return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), four[0]);
    const ints eight = add_quarters(four[0], four[1]);
    if (n == 8) return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15), eight);
    return add_quarters(eight, add_quarters(four[2], four[3]));
}

/* Lane i gets table[index[i]]. */
INLINE reals pick(reals table, const int32_t *index) {
    return _mm512_permutexvar_ps(_mm512_loadu_si512(index), table);
}

INLINE reals load_small(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p)));
}
INLINE reals load_codes(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)p)));
}
/* 2^(p - 127), and 0 for 0 */
INLINE reals load_powers(const uint8_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)p)), 23));
}
INLINE reals load_half(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p)); }
INLINE void store_half(uint16_t *p, reals v) {
    _mm256_storeu_si256((void *)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
INLINE reals load_half_part(const uint16_t *p, int n) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p));
}
INLINE reals load_brain(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16));
}
/* to[i * stride][place] = from[place][i], LANES by LANES words of 4 bytes. */
INLINE void transpose_all(const void *const *from, int64_t offset, bytes *to, int stride) {
    bytes four[16]; /* quarter q of 4 * i + j: word 4 * q + j of vectors 4 * i and following */
    for (int i = 0; i < 16; i += 4) {
        bytes v[4];
        for (int k = 0; k < 4; k++) v[k] = load_bytes((const char *)from[i + k] + offset);
        const bytes a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpacklo_epi32(v[2], v[3]);
        const bytes c = _mm512_unpackhi_epi32(v[0], v[1]), d = _mm512_unpackhi_epi32(v[2], v[3]);
        four[i] = _mm512_unpacklo_epi64(a, b), four[i + 1] = _mm512_unpackhi_epi64(a, b);
        four[i + 2] = _mm512_unpacklo_epi64(c, d), four[i + 3] = _mm512_unpackhi_epi64(c, d);
    }
    for (int j = 0; j < 4; j++) {
        const bytes a = _mm512_shuffle_i32x4(four[j], four[4 + j], 0x44), b = _mm512_shuffle_i32x4(four[8 + j], four[12 + j], 0x44);
        const bytes c = _mm512_shuffle_i32x4(four[j], four[4 + j], 0xEE), d = _mm512_shuffle_i32x4(four[8 + j], four[12 + j], 0xEE);
        to[j * stride] = _mm512_shuffle_i32x4(a, b, 0x88), to[(4 + j) * stride] = _mm512_shuffle_i32x4(a, b, 0xDD);
        to[(8 + j) * stride] = _mm512_shuffle_i32x4(c, d, 0x88), to[(12 + j) * stride] = _mm512_shuffle_i32x4(c, d, 0xDD);
    }
}
/* to[i][place] = from[place][i], 4 by 4 words of 4 bytes; `stride` bytes from one to[i] to the next. */
INLINE void transpose_words(const void *first, const void *second, const void *third, const void *fourth, void *to,
                            int64_t stride) {
    const __m128i a = _mm_loadu_si128(first), b = _mm_loadu_si128(second);
    const __m128i c = _mm_loadu_si128(third), d = _mm_loadu_si128(fourth);
    char *at = to;
    const __m128i ab = _mm_unpacklo_epi32(a, b), cd = _mm_unpacklo_epi32(c, d);
    const __m128i ab2 = _mm_unpackhi_epi32(a, b), cd2 = _mm_unpackhi_epi32(c, d);
    _mm_storeu_si128((void *)at, _mm_unpacklo_epi64(ab, cd));
    _mm_storeu_si128((void *)(at + stride), _mm_unpackhi_epi64(ab, cd));
    _mm_storeu_si128((void *)(at + 2 * stride), _mm_unpacklo_epi64(ab2, cd2));
    _mm_storeu_si128((void *)(at + 3 * stride), _mm_unpackhi_epi64(ab2, cd2));
}
