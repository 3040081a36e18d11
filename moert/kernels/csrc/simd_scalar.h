/* Plain C, for any processor: arrays of 16 bytes, which compilers often make vectors of by themselves. */
#include <string.h>

#define VECTOR 16
#define LANES 4
#define ONE_ROWS 2
#define MANY_ROWS 2
#define MANY_TOKENS 2

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

INLINE ints dot_bytes(bytes codes, const int8_t *x) {
    ints sum = {{0}};
    for (int i = 0; i < VECTOR; i++) sum.at[i / 4] += codes.at[i] * x[i];
    return sum;
}
INLINE ints dot_small(const int n, const bytes *codes, const int8_t *x) {
    ints sum = {{0}};
    for (int plane = 0; plane < n; plane++)
        for (int i = 0; i < VECTOR; i++) sum.at[i / 4] += codes[plane].at[i] * x[plane * VECTOR + i];
    return sum;
}

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

INLINE reals zero(void) { EACH(reals, LANES, 0); }
INLINE reals load_reals(const float *p) { EACH(reals, LANES, p[i]); }
INLINE void store_reals(float *p, reals v) { memcpy(p, &v, sizeof v); }
INLINE reals to_reals(ints v) { EACH(reals, LANES, (float)v.at[i]); }
INLINE reals times(reals a, reals b) { EACH(reals, LANES, a.at[i] * b.at[i]); }
INLINE reals plus(reals a, reals b) { EACH(reals, LANES, a.at[i] + b.at[i]); }
INLINE reals multiply_add(reals a, reals b, reals c) { EACH(reals, LANES, a.at[i] * b.at[i] + c.at[i]); }
INLINE float total(reals v) { return (v.at[0] + v.at[2]) + (v.at[1] + v.at[3]); }
INLINE reals pick(reals table, const int32_t *index) { EACH(reals, LANES, table.at[index[i]]); }
INLINE reals load_half(const uint16_t *p) { EACH(reals, LANES, half(p[i])); }
INLINE reals load_half_part(const uint16_t *p, int n) { EACH(reals, LANES, i < n ? half(p[i]) : 0); }
INLINE reals load_brain(const uint16_t *p) {
    reals result;
    for (int i = 0; i < LANES; i++) {
        const uint32_t bits = (uint32_t)p[i] << 16;
        memcpy(&result.at[i], &bits, sizeof bits);
    }
    return result;
}
