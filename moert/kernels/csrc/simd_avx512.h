/* 64 bytes at a time: AVX-512 with VNNI. */
#include <immintrin.h>
#include <string.h>

#define VECTOR 64
#define LANES 16
#define ONE_ROWS 4
#define MANY_ROWS 4
#define MANY_TOKENS 4

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

/* Sums of 4 products in each lane; codes of n planes, all below 16. */
INLINE ints dot_small(const int n, const bytes *codes, const int8_t *x) {
    ints sum = _mm512_setzero_si512();
    for (int i = 0; i < n; i++) sum = _mm512_dpbusd_epi32(sum, codes[i], _mm512_loadu_si512(x + i * VECTOR));
    return sum;
}
INLINE ints dot_bytes(bytes codes, const int8_t *x) {
    return _mm512_dpbusd_epi32(_mm512_setzero_si512(), codes, _mm512_loadu_si512(x));
}

INLINE reals zero(void) { return _mm512_setzero_ps(); }
INLINE reals load_reals(const float *p) { return _mm512_loadu_ps(p); }
INLINE void store_reals(float *p, reals v) { _mm512_storeu_ps(p, v); }
INLINE reals to_reals(ints v) { return _mm512_cvtepi32_ps(v); }
INLINE reals times(reals a, reals b) { return _mm512_mul_ps(a, b); }
INLINE reals plus(reals a, reals b) { return _mm512_add_ps(a, b); }
INLINE reals multiply_add(reals a, reals b, reals c) { return _mm512_fmadd_ps(a, b, c); }
INLINE float total(reals v) { return _mm512_reduce_add_ps(v); }

/* Lane i gets table[index[i]]. */
INLINE reals pick(reals table, const int32_t *index) {
    return _mm512_permutexvar_ps(_mm512_loadu_si512(index), table);
}

INLINE reals load_half(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p)); }
INLINE reals load_half_part(const uint16_t *p, int n) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p));
}
INLINE reals load_brain(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16));
}
