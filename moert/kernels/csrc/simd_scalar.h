/* Plain C, for any processor: arrays of 16 bytes, which compilers often make vectors of by themselves. */
#include <math.h>
#include <string.h>

#include "internal.h"

#define VECTOR 16
#define LANES 4
#define ONE_ROWS(bits) 2
#define MANY_ROWS 2
#define MANY_TOKENS 2
#define TRELLIS_TOKENS 2
#define TILED(bits) 1
#define SCORE_VECTORS 2
#define DELTA_VECTORS 4
#define SCAN_ROWS 4
#define STRIP_ROWS 2
#define STRIP_VECTORS 2
#define MANY(bits) 8
#define ANY_BLOCK 1 /* one code for all sizes of blocks */
#define SAME_WIDTHS 0x13C /* strips: the code for 2 bits is that for all */

typedef struct { uint8_t at[VECTOR]; } bytes;
typedef struct { int32_t at[LANES]; } ints;
typedef struct { float at[LANES]; } reals;

#define EACH(type, n, value)                      \
    type result;                                  \
    for (int i = 0; i < n; i++) result.at[i] = value; \
    return result

INLINE bytes load_bytes(const void *p) {
    bytes v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE bytes nibbles_low(bytes v) { EACH(bytes, VECTOR, v.at[i] & 15); }
INLINE bytes nibbles_high(bytes v) { EACH(bytes, VECTOR, v.at[i] >> 4); }
INLINE bytes pairs(bytes v, const int place) { EACH(bytes, VECTOR, v.at[i] >> 2 * place & 3); }
INLINE bytes load_high(const void *p) {
    const uint8_t *from = p;
    EACH(bytes, VECTOR, from[i / 2] >> i % 2 * 4 & 15);
}
INLINE bytes triples(bytes v, bytes high, const int place) {
    EACH(bytes, VECTOR, (v.at[i] >> 2 * place & 3) | (high.at[i] >> place & 1) << 2);
}

INLINE ints dot_small(const int n, const bytes *codes, const int8_t *x) {
    ints sum = {{0}};
    for (int at = 0; at < n; at++)
        for (int i = 0; i < VECTOR; i++) sum.at[i / 4] += codes[at].at[i] * x[at * VECTOR + i];
    return sum;
}
INLINE ints dot_bytes(const int n, const bytes *codes, const int8_t *x) { return dot_small(n, codes, x); }

/* Bytes → a byte for each code, in the order of the inputs. */
INLINE bytes spread_nibbles(const void *p) {
    const uint8_t *from = p;
    EACH(bytes, VECTOR, from[i / 2] >> i % 2 * 4 & 15);
}
INLINE bytes spread_pairs(const void *p) {
    const uint8_t *from = p;
    EACH(bytes, VECTOR, from[i / 4] >> i % 4 * 2 & 3);
}
/* The third bits of VECTOR codes, where they belong. */
INLINE bytes spread_thirds(const void *p) {
    const uint8_t *from = p;
    EACH(bytes, VECTOR, (from[i / 8] >> i % 8 & 1) << 2);
}
INLINE bytes look_up(const uint8_t *table, bytes v) { EACH(bytes, VECTOR, table[v.at[i]]); }
INLINE bytes or_bytes(bytes a, bytes b) { EACH(bytes, VECTOR, a.at[i] | b.at[i]); }
INLINE void store_bytes(void *p, bytes v) { memcpy(p, &v, sizeof v); }
INLINE void store_parts(void *first, void *second, bytes v) { (void)first, (void)second, (void)v; }

/* Running sums of 4 products in each lane, a token in each. */
typedef ints dots;
INLINE bytes four_codes(const int bits, const uint8_t *p) {
    (void)bits;
    EACH(bytes, VECTOR, p[i % 4]);
}
INLINE dots no_dots(void) { return (dots){{0}}; }
INLINE dots more_dots(const int bits, dots sum, bytes codes, bytes x) {
    (void)bits;
    for (int i = 0; i < VECTOR; i++) sum.at[i / 4] += codes.at[i] * (int8_t)x.at[i];
    return sum;
}
INLINE ints all_dots(const int bits, dots sum, dots inputs) {
    (void)bits, (void)inputs;
    return sum;
}

/* Trellis codes (trellis.inc): windows of 12 bits, 16 bits apart in the vector and `step` apart in memory. */
INLINE bytes load_windows(const int step, const window_places *at, const uint8_t *p) {
    bytes v;
    (void)at;
    for (int i = 0; i < VECTOR / 2; i++) {
        const int bit = i * step;
        const uint32_t window = (p[bit / 8] | (uint32_t)p[bit / 8 + 1] << 8 | (uint32_t)p[bit / 8 + 2] << 16) >> bit % 8 & 0xFFF;
        v.at[2 * i] = (uint8_t)window, v.at[2 * i + 1] = (uint8_t)(window >> 8);
    }
    return v;
}
INLINE int word_at(bytes v, int i) { return v.at[2 * i] | v.at[2 * i + 1] << 8; }
/* Of each 16 bits: the highest `bits` in the low byte, the next ones in the high one. */
INLINE bytes two_places(const int bits, bytes v) {
    EACH(bytes, VECTOR, word_at(v, i / 2) >> (16 - (i % 2 + 1) * bits) & ((1 << bits) - 1));
}
INLINE bytes times_16(bytes v, int factor) { EACH(bytes, VECTOR, (uint8_t)((uint32_t)(word_at(v, i / 2) * factor) >> i % 2 * 8)); }
INLINE bytes look_up_32(const uint8_t *table, bytes v) { EACH(bytes, VECTOR, table[v.at[i]]); }
INLINE bytes look_up_64(const uint8_t *table, bytes v) { EACH(bytes, VECTOR, table[v.at[i]]); }
INLINE bytes zip_low(bytes a, bytes b) { EACH(bytes, VECTOR, (i % 4 < 2 ? a : b).at[i / 4 * 2 + i % 2]); }
INLINE bytes zip_high(bytes a, bytes b) { EACH(bytes, VECTOR, (i % 4 < 2 ? a : b).at[VECTOR / 2 + i / 4 * 2 + i % 2]); }
INLINE bytes four_inputs(const int8_t *x) { return four_codes(2, (const uint8_t *)x); }
INLINE bytes signed_codes(bytes v) { return v; }

/* IEEE half precision, by hand: the exponent is moved, numbers below the smallest normal one are counted in 2^-24. */
INLINE float half(uint16_t pattern) {
    const uint32_t sign = (uint32_t)(pattern & 0x8000) << 16, rest = pattern & 0x7FFF;
    uint32_t bits;
    float value;
    if (rest < 0x400) return (sign ? -1.0f : 1.0f) * (float)rest * 5.9604644775390625e-8f;
    bits = sign | (rest >= 0x7C00 ? 0x7F800000 | (rest & 0x3FF) << 13 : (rest << 13) + ((127 - 15) << 23));
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The nearest one, of two equally near the even one. */
INLINE uint16_t to_half(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7FFFFFFF;
    if (rest > 0x7F800000) return (uint16_t)(sign | 0x7E00);
    if (rest >= 0x47800000) return (uint16_t)(sign | 0x7C00);
    if (rest < 0x38800000) { /* below the smallest normal one: counted in 2^-24 */
        float magnitude;
        memcpy(&magnitude, &rest, sizeof magnitude);
        return (uint16_t)(sign | (uint32_t)__builtin_rintf(magnitude * 16777216.0f));
    }
    return (uint16_t)(sign | ((rest - ((127 - 15) << 23) + 0xFFF + (rest >> 13 & 1)) >> 13));
}

INLINE ints plus_ints(ints a, ints b) { EACH(ints, LANES, a.at[i] + b.at[i]); }
INLINE reals zero(void) { EACH(reals, LANES, 0); }
INLINE reals load_reals(const float *p) { EACH(reals, LANES, p[i]); }
INLINE void store_reals(float *p, reals v) { memcpy(p, &v, sizeof v); }
INLINE reals to_reals(ints v) { EACH(reals, LANES, (float)v.at[i]); }
INLINE reals times(reals a, reals b) { EACH(reals, LANES, a.at[i] * b.at[i]); }
INLINE reals plus(reals a, reals b) { EACH(reals, LANES, a.at[i] + b.at[i]); }
INLINE reals multiply_add(reals a, reals b, reals c) { EACH(reals, LANES, fmaf(a.at[i], b.at[i], c.at[i])); }
INLINE reals splat(float v) { EACH(reals, LANES, v); }
/* Lane i gets the sum of lanes i * n and following of n vectors that lie one behind the other. */
INLINE ints add_across(const int n, const ints *v) {
    ints sum = {{0}};
    for (int i = 0; i < LANES * n; i++) sum.at[i / n] += v[i / LANES].at[i % LANES];
    return sum;
}
INLINE float total(reals v) { return (v.at[0] + v.at[2]) + (v.at[1] + v.at[3]); }
INLINE reals pick(reals table, const int32_t *index) { EACH(reals, LANES, table.at[index[i]]); }
INLINE reals load_small(const int8_t *p) { EACH(reals, LANES, (float)p[i]); }
INLINE reals load_codes(const uint8_t *p) { EACH(reals, LANES, (float)p[i]); }
/* 2^(p - 127), and 0 for 0 */
INLINE reals load_powers(const uint8_t *p) {
    uint32_t bits[LANES];
    reals v;
    for (int i = 0; i < LANES; i++) bits[i] = (uint32_t)p[i] << 23;
    memcpy(&v, bits, sizeof v);
    return v;
}
INLINE reals load_half(const uint16_t *p) { EACH(reals, LANES, half(p[i])); }
INLINE void store_half(uint16_t *p, reals v) {
    for (int i = 0; i < LANES; i++) p[i] = to_half(v.at[i]);
}
INLINE reals load_half_part(const uint16_t *p, int n) { EACH(reals, LANES, i < n ? half(p[i]) : 0); }
INLINE reals load_brain(const uint16_t *p) {
    reals result;
    for (int i = 0; i < LANES; i++) {
        const uint32_t bits = (uint32_t)p[i] << 16;
        memcpy(&result.at[i], &bits, sizeof bits);
    }
    return result;
}
/* to[i][place] = from[place][i], 4 by 4 words of 4 bytes; `stride` bytes from one to[i] to the next. */
INLINE void transpose_words(const void *first, const void *second, const void *third, const void *fourth, void *to,
                            int64_t stride) {
    const char *from[4] = {first, second, third, fourth};
    for (int place = 0; place < 4; place++)
        for (int i = 0; i < 4; i++) memcpy((char *)to + i * stride + 4 * place, from[place] + 4 * i, 4);
}
