/* 32 bytes at a time: AVX2, with FMA and half precision; DOT_PRODUCT where there is AVX-VNNI. */
#include <immintrin.h>
#include <string.h>

#define VECTOR 32
#define LANES 8
#define ONE_ROWS 4
#define MANY_ROWS 2
#define MANY_TOKENS 4

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

#ifdef DOT_PRODUCT
INLINE ints dot_small(const int n, const bytes *codes, const int8_t *x) {
    ints sum = _mm256_setzero_si256();
    for (int i = 0; i < n; i++) sum = _mm256_dpbusd_avx_epi32(sum, codes[i], load_bytes(x + i * VECTOR));
    return sum;
}
INLINE ints dot_bytes(bytes codes, const int8_t *x) {
    return _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), codes, load_bytes(x));
}
#else
/* Pairs of products are summed up in 16 bits: four planes of codes below 16 stay below 4 · 2 · 15 · 127. */
INLINE ints dot_small(const int n, const bytes *codes, const int8_t *x) {
    __m256i sum = _mm256_maddubs_epi16(codes[0], load_bytes(x));
    for (int i = 1; i < n; i++) sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes[i], load_bytes(x + i * VECTOR)));
    return _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
}
/* Codes up to 255 would not fit there, their halves do. */
INLINE ints dot_bytes(bytes codes, const int8_t *x) {
    const bytes inputs = load_bytes(x);
    const __m256i low = _mm256_maddubs_epi16(nibbles_low(codes), inputs);
    const __m256i high = _mm256_maddubs_epi16(nibbles_high(codes), inputs);
    return _mm256_add_epi32(_mm256_madd_epi16(low, _mm256_set1_epi16(1)), _mm256_madd_epi16(high, _mm256_set1_epi16(16)));
}
#endif

INLINE reals zero(void) { return _mm256_setzero_ps(); }
INLINE reals load_reals(const float *p) { return _mm256_loadu_ps(p); }
INLINE void store_reals(float *p, reals v) { _mm256_storeu_ps(p, v); }
INLINE reals to_reals(ints v) { return _mm256_cvtepi32_ps(v); }
INLINE reals times(reals a, reals b) { return _mm256_mul_ps(a, b); }
INLINE reals plus(reals a, reals b) { return _mm256_add_ps(a, b); }
INLINE reals multiply_add(reals a, reals b, reals c) { return _mm256_fmadd_ps(a, b, c); }
INLINE float total(reals v) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
INLINE reals pick(reals table, const int32_t *index) {
    return _mm256_permutevar8x32_ps(table, load_bytes(index));
}
INLINE reals load_half(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const void *)p)); }
INLINE reals load_half_part(const uint16_t *p, int n) {
    uint16_t room[LANES] = {0};
    memcpy(room, p, (size_t)n * sizeof *p);
    return load_half(room);
}
INLINE reals load_brain(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p)), 16));
}
