/* 16 bytes at a time: ARM's NEON on 64-bit processors; DOT_PRODUCT where there is sdot. */
#include <arm_neon.h>
#include <string.h>

#include "internal.h"

#define VECTOR 16
#define LANES 4
#define ONE_ROWS(bits) 4
#define MANY_ROWS 2
#define MANY_TOKENS 2
#define TRELLIS_TOKENS 2
#define TILED(bits) 1
#define SCORE_VECTORS 4
#define DELTA_VECTORS 8
#define SCAN_ROWS 4
#define STRIP_ROWS 4
#define STRIP_VECTORS 2
#define MANY(bits) 8
#define SAME_WIDTHS 0x3C /* strips: the code for 2 bits is that for 2, 3, 4 and MXFP4 */

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

/* Bytes → a byte for each code, in the order of the inputs. */
INLINE bytes spread_nibbles(const void *p) {
    const uint8x8_t v = vld1_u8(p), low = vand_u8(v, vdup_n_u8(15)), high = vshr_n_u8(v, 4);
    return vcombine_u8(vzip1_u8(low, high), vzip2_u8(low, high));
}
INLINE bytes spread_pairs(const void *p) {
    uint32_t four;
    memcpy(&four, p, sizeof four);
    const uint8x8_t v = vreinterpret_u8_u32(vdup_n_u32(four)), twice = vzip1_u8(v, v);
    const bytes each = vcombine_u8(vzip1_u8(twice, twice), vzip2_u8(twice, twice));
    const int8_t shift[16] = {0, -2, -4, -6, 0, -2, -4, -6, 0, -2, -4, -6, 0, -2, -4, -6};
    return vandq_u8(vshlq_u8(each, vld1q_s8(shift)), vdupq_n_u8(3));
}
/* The third bits of VECTOR codes, where they belong. */
INLINE bytes spread_thirds(const void *p) {
    const uint8_t *two = p, place[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const bytes each = vcombine_u8(vdup_n_u8(two[0]), vdup_n_u8(two[1]));
    return vandq_u8(vtstq_u8(each, vld1q_u8(place)), vdupq_n_u8(4));
}
INLINE bytes look_up(const uint8_t *table, bytes v) { return vqtbl1q_u8(vld1q_u8(table), v); }
INLINE bytes or_bytes(bytes a, bytes b) { return vorrq_u8(a, b); }
INLINE void store_bytes(void *p, bytes v) { vst1q_u8(p, v); }
INLINE void store_parts(void *first, void *second, bytes v) { (void)first, (void)second, (void)v; }
/* Bytes count as signed: codes of 8 bits less 128, and 128 times the inputs comes back in all_dots. */
INLINE bytes four_codes(const int bits, const uint8_t *p) {
    uint32_t codes;
    memcpy(&codes, p, sizeof codes);
    return vreinterpretq_u8_u32(vdupq_n_u32(bits == 8 ? codes ^ 0x80808080u : codes));
}
#define SIGNED_CODES

#ifdef DOT_PRODUCT
/* Running sums of 4 products in each lane, a token in each. */
typedef int32x4_t dots;
INLINE dots no_dots(void) { return vdupq_n_s32(0); }
INLINE dots more_dots(const int bits, dots sum, bytes codes, bytes x) {
    (void)bits;
    return vdotq_s32(sum, vreinterpretq_s8_u8(codes), vreinterpretq_s8_u8(x));
}
INLINE ints all_dots(const int bits, dots sum, dots inputs) {
    return bits == 8 ? vaddq_s32(sum, vshlq_n_s32(inputs, 7)) : sum;
}
INLINE ints dot_small(const int n, const bytes *codes, const int8_t *x) {
    ints sum = vdupq_n_s32(0);
    for (int i = 0; i < n; i++) sum = vdotq_s32(sum, vreinterpretq_s8_u8(codes[i]), vld1q_s8(x + i * VECTOR));
    return sum;
}
/* Bytes count as signed: code - 128, and 128 times the inputs comes back. */
INLINE ints dot_bytes(const int n, const bytes *codes, const int8_t *x) {
    ints sum = vdupq_n_s32(0), sums = sum;
    for (int i = 0; i < n; i++) {
        const int8x16_t inputs = vld1q_s8(x + i * VECTOR);
        sum = vdotq_s32(sum, vreinterpretq_s8_u8(veorq_u8(codes[i], vdupq_n_u8(128))), inputs);
        sums = vdotq_s32(sums, vdupq_n_s8(1), inputs);
    }
    return vaddq_s32(sum, vshlq_n_s32(sums, 7));
}
#else
/* Running sums of 4 products in each lane, a token in each; two sums a token until the end. */
typedef struct { int32x4_t low, high; } dots;
INLINE dots no_dots(void) { return (dots){vdupq_n_s32(0), vdupq_n_s32(0)}; }
INLINE dots more_dots(const int bits, dots sum, bytes codes, bytes x) {
    const int8x16_t code = vreinterpretq_s8_u8(codes), inputs = vreinterpretq_s8_u8(x);
    (void)bits;
    sum.low = vpadalq_s16(sum.low, vmull_s8(vget_low_s8(code), vget_low_s8(inputs)));
    sum.high = vpadalq_s16(sum.high, vmull_high_s8(code, inputs));
    return sum;
}
INLINE ints all_dots(const int bits, dots sum, dots inputs) {
    const ints all = vpaddq_s32(sum.low, sum.high);
    return bits == 8 ? vaddq_s32(all, vshlq_n_s32(vpaddq_s32(inputs.low, inputs.high), 7)) : all;
}

/* Products are summed up in 16 bits, two and two in 32: up to 4 vectors of codes below 16 stay below 4 · 2 · 15 · 127. */
INLINE ints dot_small(const int n, const bytes *codes, const int8_t *x) {
    int16x8_t low = vdupq_n_s16(0), high = low;
    for (int i = 0; i < n; i++) {
        const int8x16_t code = vreinterpretq_s8_u8(codes[i]), inputs = vld1q_s8(x + i * VECTOR);
        low = vmlal_s8(low, vget_low_s8(code), vget_low_s8(inputs));
        high = vmlal_high_s8(high, code, inputs);
    }
    return vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
}
INLINE ints dot_bytes(const int n, const bytes *codes, const int8_t *x) {
    ints sum = vdupq_n_s32(0), sums = sum;
    for (int i = 0; i < n; i++) {
        const int8x16_t inputs = vld1q_s8(x + i * VECTOR);
        const int8x16_t shifted = vreinterpretq_s8_u8(veorq_u8(codes[i], vdupq_n_u8(128)));
        const int16x8_t low = vmull_s8(vget_low_s8(shifted), vget_low_s8(inputs)), high = vmull_high_s8(shifted, inputs);
        sum = vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
        sums = vpadalq_s16(sums, vpaddlq_s8(inputs));
    }
    return vaddq_s32(sum, vshlq_n_s32(sums, 7));
}
#endif

/* Trellis codes (trellis.inc): windows of 12 bits, 16 bits apart in the vector and `step` apart in memory. */
INLINE bytes load_windows(const int step, const window_places *at, const uint8_t *p) {
    (void)step;
    const bytes v = vld1q_u8(p);
    const uint32x4_t even = vshlq_u32(vreinterpretq_u32_u8(vqtbl1q_u8(v, vld1q_u8(at->even))), vnegq_s32(vld1q_s32(at->down)));
    const uint32x4_t odd = vshlq_u32(vreinterpretq_u32_u8(vqtbl1q_u8(v, vld1q_u8(at->odd))), vld1q_s32(at->up));
    const uint32x4_t all = vorrq_u32(vandq_u32(even, vdupq_n_u32(0xFFF)), vandq_u32(odd, vdupq_n_u32(0xFFF0000)));
    return vreinterpretq_u8_u32(all);
}
/* Of each 16 bits: the highest `bits` in the low byte, the next ones in the high one. */
INLINE bytes two_places(const int bits, bytes h) {
    const uint16x8_t v = vreinterpretq_u16_u8(h), mask = vdupq_n_u16((uint16_t)(((1 << bits) - 1) << 8));
    const uint16x8_t high = vandq_u16(vshlq_u16(v, vdupq_n_s16((int16_t)(2 * bits - 8))), mask);
    return vreinterpretq_u8_u16(vorrq_u16(vshlq_u16(v, vdupq_n_s16((int16_t)(bits - 16))), high));
}
INLINE bytes times_16(bytes v, int factor) {
    return vreinterpretq_u8_u16(vmulq_n_u16(vreinterpretq_u16_u8(v), (uint16_t)factor));
}
INLINE bytes look_up_32(const uint8_t *table, bytes v) { return vqtbl2q_u8(vld1q_u8_x2(table), v); }
INLINE bytes look_up_64(const uint8_t *table, bytes v) { return vqtbl4q_u8(vld1q_u8_x4(table), v); }
INLINE bytes zip_low(bytes a, bytes b) {
    return vreinterpretq_u8_u16(vzip1q_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b)));
}
INLINE bytes zip_high(bytes a, bytes b) {
    return vreinterpretq_u8_u16(vzip2q_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b)));
}
INLINE bytes four_inputs(const int8_t *x) {
    uint32_t four;
    memcpy(&four, x, sizeof four);
    return vreinterpretq_u8_u32(vdupq_n_u32(four));
}
INLINE bytes signed_codes(bytes v) { return veorq_u8(v, vdupq_n_u8(128)); }
INLINE ints plus_ints(ints a, ints b) { return vaddq_s32(a, b); }

INLINE reals zero(void) { return vdupq_n_f32(0); }
INLINE reals load_reals(const float *p) { return vld1q_f32(p); }
INLINE void store_reals(float *p, reals v) { vst1q_f32(p, v); }
INLINE reals to_reals(ints v) { return vcvtq_f32_s32(v); }
INLINE reals times(reals a, reals b) { return vmulq_f32(a, b); }
INLINE reals plus(reals a, reals b) { return vaddq_f32(a, b); }
INLINE reals multiply_add(reals a, reals b, reals c) { return vfmaq_f32(c, a, b); }
INLINE reals splat(float v) { return vdupq_n_f32(v); }
/* Lane i gets the sum of lanes i * n and following of n vectors that lie one behind the other. */
INLINE ints add_across(const int n, const ints *v) {
    if (n == 1) return v[0];
    if (n == 2) return vpaddq_s32(v[0], v[1]);
    return vpaddq_s32(vpaddq_s32(v[0], v[1]), vpaddq_s32(v[2], v[3]));
}
/* Halves are added until one lane is left. */
INLINE float total(reals v) {
    const float32x2_t half = vadd_f32(vget_low_f32(v), vget_high_f32(v));
    return vget_lane_f32(half, 0) + vget_lane_f32(half, 1);
}
INLINE reals pick(reals table, const int32_t *index) {
    const float lanes[LANES] = {table[index[0]], table[index[1]], table[index[2]], table[index[3]]};
    return vld1q_f32(lanes);
}
INLINE reals load_small(const int8_t *p) {
    int32_t four;
    memcpy(&four, p, sizeof four);
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four))))));
}
INLINE reals load_codes(const uint8_t *p) {
    uint32_t four;
    memcpy(&four, p, sizeof four);
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four))))));
}
/* 2^(p - 127), and 0 for 0 */
INLINE reals load_powers(const uint8_t *p) {
    uint32_t four;
    memcpy(&four, p, sizeof four);
    const uint16x8_t wide = vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)));
    return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vget_low_u16(wide)), 23));
}
INLINE reals load_half(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
INLINE void store_half(uint16_t *p, reals v) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v))); }
INLINE reals load_half_part(const uint16_t *p, int n) {
    uint16_t room[LANES] = {0};
    memcpy(room, p, (size_t)n * sizeof *p);
    return load_half(room);
}
INLINE reals load_brain(const uint16_t *p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
/* to[i][place] = from[place][i], 4 by 4 words of 4 bytes; `stride` bytes from one to[i] to the next. */
INLINE void transpose_words(const void *first, const void *second, const void *third, const void *fourth, void *to,
                            int64_t stride) {
    const uint32x4_t a = vreinterpretq_u32_u8(vld1q_u8(first)), b = vreinterpretq_u32_u8(vld1q_u8(second));
    const uint32x4_t c = vreinterpretq_u32_u8(vld1q_u8(third)), d = vreinterpretq_u32_u8(vld1q_u8(fourth));
    uint8_t *at = to;
    const uint64x2_t ab = vreinterpretq_u64_u32(vzip1q_u32(a, b)), cd = vreinterpretq_u64_u32(vzip1q_u32(c, d));
    const uint64x2_t ab2 = vreinterpretq_u64_u32(vzip2q_u32(a, b)), cd2 = vreinterpretq_u64_u32(vzip2q_u32(c, d));
    vst1q_u8(at, vreinterpretq_u8_u64(vzip1q_u64(ab, cd)));
    vst1q_u8(at + stride, vreinterpretq_u8_u64(vzip2q_u64(ab, cd)));
    vst1q_u8(at + 2 * stride, vreinterpretq_u8_u64(vzip1q_u64(ab2, cd2)));
    vst1q_u8(at + 3 * stride, vreinterpretq_u8_u64(vzip2q_u64(ab2, cd2)));
}
