/* 32 bytes at a time: AVX2, with FMA and half precision; DOT_PRODUCT where there is AVX-VNNI. */
#include <immintrin.h>
#include <string.h>

#include "internal.h"

#define VECTOR 32
#define LANES 8
#define ONE_ROWS(bits) 4
#define MANY_ROWS 2
#define MANY_TOKENS 2
#define TILED(bits) 0
#define TRELLIS_TOKENS 4
#define FEW_VECTORS 2
#define SCORE_VECTORS 2
#define DELTA_VECTORS 4
#define SCAN_ROWS 4
#define STRIP_ROWS 2
#define STRIP_VECTORS 2
#ifdef DOT_PRODUCT
#define FEW_TOKENS 4
#define FEW(bits) ((bits) == 2 ? MANY(2) : (bits) == 8 ? 3 : 2)
#define MANY(bits) ((bits) == 0 ? 10 : (bits) == 2 ? 13 : 44)
#define SAME_WIDTHS 0x13C /* strips: the code for 2 bits is that for all */
#else
#define FEW_TOKENS 2 /* sums of more would not stay in registers */
#define FEW(bits) ((bits) == 2 ? MANY(2) : (bits) == 4 || (bits) == MOERT_MXFP4 ? 4 : 2)
#define MANY(bits) ((bits) == 0 ? 10 : (bits) == 2 ? 13 : (bits) == 3 ? 12 : 100)
#define SAME_WIDTHS 0xC /* 2 and 3 */
#endif

typedef __m256i bytes;
typedef __m256i ints;
typedef __m256 reals;

INLINE bytes load_bytes(const void *p) { return _mm256_loadu_si256(p); }
INLINE bytes nibbles_low(bytes v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
INLINE bytes nibbles_high(bytes v) { return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15)); }
INLINE bytes pairs(bytes v, const int place) {
    return _mm256_and_si256(_mm256_srli_epi16(v, 2 * place), _mm256_set1_epi8(3));
}
INLINE bytes load_high(const void *p) {
    bytes wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(p));
    return _mm256_or_si256(wide, _mm256_slli_epi16(wide, 4));
}
INLINE bytes triples(bytes v, bytes high, const int place) {
    bytes third = place < 2 ? _mm256_slli_epi16(high, 2 - place) : _mm256_srli_epi16(high, place - 2);
    return _mm256_or_si256(pairs(v, place), _mm256_and_si256(third, _mm256_set1_epi8(4)));
}

/* Bytes → a byte for each code, in the order of the inputs. */
INLINE bytes spread_nibbles(const void *p) {
    const __m256i v = _mm256_cvtepu8_epi16(_mm_loadu_si128(p));
    return _mm256_and_si256(_mm256_or_si256(v, _mm256_slli_epi16(v, 4)), _mm256_set1_epi8(15));
}
INLINE bytes spread_pairs(const void *p) {
    __m256i v = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p));
    v = _mm256_or_si256(v, _mm256_slli_epi32(v, 6));
    return _mm256_and_si256(_mm256_or_si256(v, _mm256_slli_epi32(v, 12)), _mm256_set1_epi8(3));
}
/* The third bits of VECTOR codes, where they belong. */
INLINE bytes spread_thirds(const void *p) {
    int32_t bits;
    memcpy(&bits, p, sizeof bits);
    const __m256i place = _mm256_set1_epi64x((long long)0x8040201008040201);
    const __m256i from = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    const __m256i here = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(bits), from), place);
    return _mm256_and_si256(_mm256_cmpeq_epi8(here, place), _mm256_set1_epi8(4));
}
INLINE bytes look_up(const uint8_t *table, bytes v) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)table)), v);
}
INLINE bytes or_bytes(bytes a, bytes b) { return _mm256_or_si256(a, b); }
INLINE void store_bytes(void *p, bytes v) { _mm256_storeu_si256(p, v); }
INLINE void store_parts(void *first, void *second, bytes v) { (void)first, (void)second, (void)v; }
INLINE bytes four_codes(const int bits, const uint8_t *p) {
    int32_t codes;
    memcpy(&codes, p, sizeof codes);
    (void)bits;
    return _mm256_set1_epi32(codes);
}

#ifdef DOT_PRODUCT
/* Running sums of 4 products in each lane, a token in each. */
typedef __m256i dots;
INLINE dots no_dots(void) { return _mm256_setzero_si256(); }
INLINE dots more_dots(const int bits, dots sum, bytes codes, bytes x) {
    (void)bits;
    return _mm256_dpbusd_avx_epi32(sum, codes, x);
}
INLINE ints all_dots(const int bits, dots sum, dots inputs) {
    (void)bits, (void)inputs;
    return sum;
}
INLINE ints dot_small(const int n, const bytes *codes, const int8_t *x) {
    ints sum = _mm256_setzero_si256();
    for (int i = 0; i < n; i++) sum = _mm256_dpbusd_avx_epi32(sum, codes[i], load_bytes(x + i * VECTOR));
    return sum;
}
INLINE ints dot_bytes(const int n, const bytes *codes, const int8_t *x) { return dot_small(n, codes, x); }
#else
/* Running sums of 4 products in each lane, a token in each; in 16 bits, where the steps of 4 inputs stay below 8 · 2 · 15 · 127,
 * or with codes of 3 bits below 16 · 2 · 7 · 127. Codes of 8 bits go by halves. */
#define DOTS_HOLD(bits) ((bits) < 4 ? 64 : 32)
typedef struct { __m256i low, high; } dots;
INLINE dots no_dots(void) { return (dots){_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE dots more_dots(const int bits, dots sum, bytes codes, bytes x) {
    sum.low = _mm256_add_epi16(sum.low, _mm256_maddubs_epi16(bits == 8 ? nibbles_low(codes) : codes, x));
    if (bits == 8) sum.high = _mm256_add_epi16(sum.high, _mm256_maddubs_epi16(nibbles_high(codes), x));
    return sum;
}
INLINE ints all_dots(const int bits, dots sum, dots inputs) {
    const ints low = _mm256_madd_epi16(sum.low, _mm256_set1_epi16(1));
    (void)inputs;
    return bits == 8 ? _mm256_add_epi32(low, _mm256_madd_epi16(sum.high, _mm256_set1_epi16(16))) : low;
}

/* Pairs of products are summed up in 16 bits: up to 4 vectors of codes below 16 stay below 4 · 2 · 15 · 127. */
INLINE ints dot_small(const int n, const bytes *codes, const int8_t *x) {
    __m256i sum = _mm256_maddubs_epi16(codes[0], load_bytes(x));
    for (int i = 1; i < n; i++) sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes[i], load_bytes(x + i * VECTOR)));
    return _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
}
/* Codes up to 255 would not fit there, their halves do. */
INLINE ints dot_bytes(const int n, const bytes *codes, const int8_t *x) {
    dots sum = no_dots();
    for (int i = 0; i < n; i++) sum = more_dots(8, sum, codes[i], load_bytes(x + i * VECTOR));
    return all_dots(8, sum, sum);
}
#endif

/* Trellis codes (trellis.inc): windows of 12 bits, 16 bits apart in the vector and `step` apart in memory. */
INLINE bytes load_windows(const int step, const window_places *at, const uint8_t *p) {
    const bytes v = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const void *)p)), _mm_loadu_si128((const void *)(p + step)), 1);
    const bytes even = _mm256_srlv_epi32(_mm256_shuffle_epi8(v, load_bytes(at->even)), load_bytes(at->down));
    const bytes odd = _mm256_sllv_epi32(_mm256_shuffle_epi8(v, load_bytes(at->odd)), load_bytes(at->up));
    return _mm256_and_si256(_mm256_blend_epi16(even, odd, 0xAA), _mm256_set1_epi16(0xFFF));
}
/* Of each 16 bits: the highest `bits` in the low byte, the next ones in the high one. */
INLINE bytes two_places(const int bits, bytes v) {
    const bytes high = _mm256_and_si256(_mm256_slli_epi16(v, 2 * bits - 8), _mm256_set1_epi16((short)(((1 << bits) - 1) << 8)));
    return _mm256_or_si256(_mm256_srli_epi16(v, 16 - bits), high);
}
INLINE bytes times_16(bytes v, int factor) { return _mm256_mullo_epi16(v, _mm256_set1_epi16((short)factor)); }
INLINE bytes look_up_32(const uint8_t *table, bytes v) {
    const bytes second = _mm256_slli_epi16(v, 3); /* bit 4 at the top of each byte */
    return _mm256_blendv_epi8(look_up(table, v), look_up(table + 16, v), second);
}
INLINE bytes look_up_64(const uint8_t *table, bytes v) {
    const bytes second = _mm256_slli_epi16(v, 3), upper = _mm256_slli_epi16(v, 2); /* bit 4, bit 5 at the top of each byte */
    const bytes low = _mm256_blendv_epi8(look_up(table, v), look_up(table + 16, v), second);
    const bytes high = _mm256_blendv_epi8(look_up(table + 32, v), look_up(table + 48, v), second);
    return _mm256_blendv_epi8(low, high, upper);
}
INLINE bytes zip_low(bytes a, bytes b) { return _mm256_unpacklo_epi16(a, b); }
INLINE bytes zip_high(bytes a, bytes b) { return _mm256_unpackhi_epi16(a, b); }
INLINE bytes four_inputs(const int8_t *x) { return _mm256_set1_epi32(*(const int32_t *)(const void *)x); }
INLINE bytes signed_codes(bytes v) { return v; }
INLINE ints plus_ints(ints a, ints b) { return _mm256_add_epi32(a, b); }

INLINE reals zero(void) { return _mm256_setzero_ps(); }
INLINE reals load_reals(const float *p) { return _mm256_loadu_ps(p); }
INLINE void store_reals(float *p, reals v) { _mm256_storeu_ps(p, v); }
INLINE reals to_reals(ints v) { return _mm256_cvtepi32_ps(v); }
INLINE reals times(reals a, reals b) { return _mm256_mul_ps(a, b); }
INLINE reals plus(reals a, reals b) { return _mm256_add_ps(a, b); }
INLINE reals multiply_add(reals a, reals b, reals c) { return _mm256_fmadd_ps(a, b, c); }
INLINE reals splat(float v) { return _mm256_set1_ps(v); }
/* Lane i gets the sum of lanes i * n and following of n vectors that lie one behind the other. */
INLINE ints add_across(const int n, const ints *v) {
    if (n == 1) return v[0];
    ints two[4];
    for (int i = 0; i < n / 2; i++) two[i] = _mm256_hadd_epi32(v[2 * i], v[2 * i + 1]); /* in each half: of one, of the other */
    if (n == 2) return _mm256_permute4x64_epi64(two[0], 0xD8);
    const ints four = _mm256_hadd_epi32(two[0], two[1]);
    if (n == 4) return _mm256_permutevar8x32_epi32(four, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    const ints rest = _mm256_hadd_epi32(two[2], two[3]);
    return _mm256_add_epi32(_mm256_permute2x128_si256(four, rest, 0x20), _mm256_permute2x128_si256(four, rest, 0x31));
}
/* Halves are added until one lane is left. */
INLINE float total(reals v) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
INLINE reals pick(reals table, const int32_t *index) {
    return _mm256_permutevar8x32_ps(table, load_bytes(index));
}
INLINE reals load_small(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p)));
}
INLINE reals load_codes(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)p)));
}
/* 2^(p - 127), and 0 for 0 */
INLINE reals load_powers(const uint8_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)p)), 23));
}
INLINE reals load_half(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const void *)p)); }
INLINE void store_half(uint16_t *p, reals v) {
    _mm_storeu_si128((void *)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
INLINE reals load_half_part(const uint16_t *p, int n) {
    uint16_t room[LANES] = {0};
    memcpy(room, p, (size_t)n * sizeof *p);
    return load_half(room);
}
INLINE reals load_brain(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p)), 16));
}
/* to[i * stride][place] = from[place][i], LANES by LANES words of 4 bytes. */
INLINE void transpose_all(const void *const *from, int64_t offset, bytes *to, int stride) {
    bytes four[8]; /* half h of 4 * i + j: word 4 * h + j of vectors 4 * i and following */
    for (int i = 0; i < 8; i += 4) {
        bytes v[4];
        for (int k = 0; k < 4; k++) v[k] = load_bytes((const char *)from[i + k] + offset);
        const bytes a = _mm256_unpacklo_epi32(v[0], v[1]), b = _mm256_unpacklo_epi32(v[2], v[3]);
        const bytes c = _mm256_unpackhi_epi32(v[0], v[1]), d = _mm256_unpackhi_epi32(v[2], v[3]);
        four[i] = _mm256_unpacklo_epi64(a, b), four[i + 1] = _mm256_unpackhi_epi64(a, b);
        four[i + 2] = _mm256_unpacklo_epi64(c, d), four[i + 3] = _mm256_unpackhi_epi64(c, d);
    }
    for (int j = 0; j < 4; j++) {
        to[j * stride] = _mm256_permute2x128_si256(four[j], four[4 + j], 0x20);
        to[(4 + j) * stride] = _mm256_permute2x128_si256(four[j], four[4 + j], 0x31);
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
