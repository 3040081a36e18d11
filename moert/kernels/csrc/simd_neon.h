/* 16 bytes at a time: ARM's NEON on 64-bit processors; DOT_PRODUCT where there is sdot. */
#include <arm_neon.h>
#include <string.h>

#define VECTOR 16
#define LANES 4
#define ONE_ROWS 4
#define MANY_ROWS 4
#define MANY_TOKENS 4

typedef uint8x16_t bytes;
typedef int32x4_t ints;
typedef float32x4_t reals;

INLINE bytes load_bytes(const void *p) { return vld1q_u8(p); }
INLINE bytes nibbles_low(bytes v) { return vandq_u8(v, vdupq_n_u8(15)); }
INLINE bytes nibbles_high(bytes v) { return vshrq_n_u8(v, 4); }
INLINE bytes pairs(bytes v, const int place) {
    return vandq_u8(vshlq_u8(v, vdupq_n_s8((int8_t)(-2 * place))), vdupq_n_u8(3));
}
INLINE bytes load_high(const void *p) {
    const uint8x8_t v = vld1_u8(p);
    return vcombine_u8(vzip1_u8(v, vshr_n_u8(v, 4)), vzip2_u8(v, vshr_n_u8(v, 4)));
}
INLINE bytes triples(bytes v, bytes high, const int place) {
    const bytes third = vshlq_u8(high, vdupq_n_s8((int8_t)(2 - place)));
    return vorrq_u8(pairs(v, place), vandq_u8(third, vdupq_n_u8(4)));
}

#ifdef DOT_PRODUCT
INLINE ints dot_small(const int n, const bytes *codes, const int8_t *x) {
    ints sum = vdupq_n_s32(0);
    for (int i = 0; i < n; i++) sum = vdotq_s32(sum, vreinterpretq_s8_u8(codes[i]), vld1q_s8(x + i * VECTOR));
    return sum;
}
/* Bytes count as signed: code - 128, and 128 times the inputs comes back. */
INLINE ints dot_bytes(bytes codes, const int8_t *x) {
    const int8x16_t inputs = vld1q_s8(x), shifted = vreinterpretq_s8_u8(veorq_u8(codes, vdupq_n_u8(128)));
    const ints sums = vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(1), inputs);
    return vdotq_s32(vshlq_n_s32(sums, 7), shifted, inputs);
}
#else
/* Products are summed up in 16 bits, two and two in 32: four planes of codes below 16 stay below 4 · 2 · 15 · 127. */
INLINE ints dot_small(const int n, const bytes *codes, const int8_t *x) {
    int16x8_t low = vdupq_n_s16(0), high = low;
    for (int i = 0; i < n; i++) {
        const int8x16_t code = vreinterpretq_s8_u8(codes[i]), inputs = vld1q_s8(x + i * VECTOR);
        low = vmlal_s8(low, vget_low_s8(code), vget_low_s8(inputs));
        high = vmlal_high_s8(high, code, inputs);
    }
    return vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
}
INLINE ints dot_bytes(bytes codes, const int8_t *x) {
    const int8x16_t inputs = vld1q_s8(x), shifted = vreinterpretq_s8_u8(veorq_u8(codes, vdupq_n_u8(128)));
    const int16x8_t low = vmull_s8(vget_low_s8(shifted), vget_low_s8(inputs)), high = vmull_high_s8(shifted, inputs);
    const ints sums = vpaddlq_s16(vpaddlq_s8(inputs));
    return vaddq_s32(vshlq_n_s32(sums, 7), vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
}
#endif

INLINE reals zero(void) { return vdupq_n_f32(0); }
INLINE reals load_reals(const float *p) { return vld1q_f32(p); }
INLINE void store_reals(float *p, reals v) { vst1q_f32(p, v); }
INLINE reals to_reals(ints v) { return vcvtq_f32_s32(v); }
INLINE reals times(reals a, reals b) { return vmulq_f32(a, b); }
INLINE reals plus(reals a, reals b) { return vaddq_f32(a, b); }
INLINE reals multiply_add(reals a, reals b, reals c) { return vfmaq_f32(c, a, b); }
INLINE float total(reals v) { return vaddvq_f32(v); }
INLINE reals pick(reals table, const int32_t *index) {
    const float lanes[LANES] = {table[index[0]], table[index[1]], table[index[2]], table[index[3]]};
    return vld1q_f32(lanes);
}
INLINE reals load_half(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
INLINE reals load_half_part(const uint16_t *p, int n) {
    uint16_t room[LANES] = {0};
    memcpy(room, p, (size_t)n * sizeof *p);
    return load_half(room);
}
INLINE reals load_brain(const uint16_t *p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
