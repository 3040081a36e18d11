/* Keys and values in memory; moert_keep. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attend.h"

static int64_t key_place(const kept *keys, int head, int position, int feature) {
    int64_t row = (int64_t)(position / MOERT_KEYS) * keys->dim + feature;
    return head * keys->at.key_stride + row * MOERT_KEYS + position % MOERT_KEYS;
}

static int64_t value_place(const kept *keys, int head, int position, int feature) {
    return head * keys->at.value_stride + (int64_t)position * keys->dim + feature;
}

static uint16_t *key_step(const kept *keys, int head, int position) {
    return keys->small ? keys->at.key_steps + head * keys->at.key_step_stride + position : NULL;
}

static uint16_t *value_step(const kept *keys, int head, int position) {
    return keys->small ? keys->at.value_steps + head * keys->at.value_step_stride + position : NULL;
}

/* What lies there; step: NULL for 16 bits. */
static double number_at(const void *numbers, int64_t place, const uint16_t *step) {
    if (!step) return half_value(((const uint16_t *)numbers)[place]);
    return ((const int8_t *)numbers)[place] * half_value(*step);
}

static void draw_number(void *numbers, int64_t place, int small) {
    if (small) ((int8_t *)numbers)[place] = (int8_t)(draw(255) - 127);
    else ((uint16_t *)numbers)[place] = draw_half(PLAIN);
}

static void copy_number(void *to, const void *from, int64_t place, int small) {
    size_t size = small ? sizeof(int8_t) : sizeof(uint16_t);
    memcpy((char *)to + place * (int64_t)size, (const char *)from + place * (int64_t)size, size);
}

static void *nothing(size_t bytes) {
    void *made = claim(bytes);
    memset(made, 0xFF, bytes);
    return made;
}

kept kept_make(int heads, int dim, int length, int from, int stop) {
    int64_t keys = (int64_t)(length + MOERT_KEYS - 1) / MOERT_KEYS * MOERT_KEYS * dim, values = (int64_t)length * dim;
    kept made = {.heads = heads, .dim = dim, .length = length, .small = draw(3) == 0};
    size_t size = made.small ? sizeof(int8_t) : sizeof(uint16_t);
    made.at.key_stride = keys + 7 * draw(2), made.at.value_stride = values + 7 * draw(2);
    made.at.key_step_stride = keys / dim + 3 * draw(2), made.at.value_step_stride = length + 3 * draw(2);
    made.bytes[0] = (size_t)((heads - 1) * made.at.key_stride + keys) * size;
    made.bytes[1] = (size_t)((heads - 1) * made.at.value_stride + values) * size;
    made.at.keys = nothing(made.bytes[0]), made.at.values = nothing(made.bytes[1]);
    if (made.small) {
        made.bytes[2] = (size_t)((heads - 1) * made.at.key_step_stride + keys / dim) * sizeof(uint16_t);
        made.bytes[3] = (size_t)((heads - 1) * made.at.value_step_stride + length) * sizeof(uint16_t);
        made.at.key_steps = nothing(made.bytes[2]), made.at.value_steps = nothing(made.bytes[3]);
    }
    for (int head = 0; head < heads; head++)
        for (int at = 0; at < length; at++) {
            if (at >= from && at < stop) continue;
            if (made.small) *key_step(&made, head, at) = (uint16_t)(draw_half(PLAIN) & 0x7FFF) / 8;
            if (made.small) *value_step(&made, head, at) = (uint16_t)(draw_half(PLAIN) & 0x7FFF) / 8;
            for (int i = 0; i < dim; i++) {
                draw_number(made.at.keys, key_place(&made, head, at, i), made.small);
                draw_number(made.at.values, value_place(&made, head, at, i), made.small);
            }
        }
    return made;
}

static void *copy_of(const void *from, size_t bytes) {
    if (!from) return NULL;
    void *made = claim(bytes);
    memcpy(made, from, bytes);
    return made;
}

kept kept_copy(const kept *from) {
    kept made = *from;
    made.at.keys = copy_of(from->at.keys, from->bytes[0]), made.at.values = copy_of(from->at.values, from->bytes[1]);
    made.at.key_steps = copy_of(from->at.key_steps, from->bytes[2]);
    made.at.value_steps = copy_of(from->at.value_steps, from->bytes[3]);
    return made;
}

void kept_free(kept *keys) {
    free(keys->at.keys), free(keys->at.values), free(keys->at.key_steps), free(keys->at.value_steps);
}

int kept_equal(const kept *a, const kept *b) {
    const void *one[] = {a->at.keys, a->at.values, a->at.key_steps, a->at.value_steps};
    const void *other[] = {b->at.keys, b->at.values, b->at.key_steps, b->at.value_steps};
    for (int part = 0; part < (a->small ? 4 : 2); part++)
        if (memcmp(one[part], other[part], a->bytes[part])) return 0;
    return 1;
}

void kept_numbers(const kept *from, estimate *keys, estimate *values) {
    int place = 0;
    for (int head = 0; head < from->heads; head++)
        for (int at = 0; at < from->length; at++)
            for (int i = 0; i < from->dim; i++, place++) {
                keys->value[place] = number_at(from->at.keys, key_place(from, head, at, i), key_step(from, head, at));
                values->value[place] =
                    number_at(from->at.values, value_place(from, head, at, i), value_step(from, head, at));
                keys->error[place] = values->error[place] = 0;
            }
}

void kept_rounded(const kept *keys, const estimate *x, estimate *y) {
    double largest = 0;
    if (!keys->small) {
        plain_halves(x, keys->dim, y);
        return;
    }
    for (int i = 0; i < keys->dim; i++) largest = fmax(largest, fabs(x->value[i]) + x->error[i]);
    for (int i = 0; i < keys->dim; i++) {
        y->value[i] = fmax(fmin(x->value[i], 127 * 65504.0), -127 * 65504.0);
        y->error[i] = x->error[i] + 0.51 * largest / 127 + 1e-3 * fabs(x->value[i]) + 127 * 6e-8;
    }
}

void kept_check(const engine *on, const kept *found, const kept *before, int from, int stop, const estimate *keys,
                const estimate *values) {
    int dim = found->dim;
    float *key = claim((size_t)dim * sizeof *key), *value = claim((size_t)dim * sizeof *value);
    kept written = kept_copy(before);
    for (int head = 0; head < found->heads; head++)
        for (int at = from; at < stop; at++) {
            int place = (head * found->length + at) * dim;
            estimate expected_key = estimate_at(keys, place), expected_value = estimate_at(values, place);
            if (found->small) *key_step(&written, head, at) = *key_step(found, head, at);
            if (found->small) *value_step(&written, head, at) = *value_step(found, head, at);
            for (int i = 0; i < dim; i++) {
                int64_t key_at = key_place(found, head, at, i), value_at = value_place(found, head, at, i);
                copy_number(written.at.keys, found->at.keys, key_at, found->small);
                copy_number(written.at.values, found->at.values, value_at, found->small);
                key[i] = (float)number_at(found->at.keys, key_at, key_step(found, head, at));
                value[i] = (float)number_at(found->at.values, value_at, value_step(found, head, at));
            }
            check(on, "key", key, &expected_key, dim);
            check(on, "value", value, &expected_value, dim);
        }
    require(on, kept_equal(found, &written), "a key or value was changed that must stay");
    kept_free(&written);
    free(key), free(value);
}

/* Encoded tokens whose keys and values are written from position `start` on. */
typedef struct {
    problem_matrix k, v;
    moert_attention block;
    int tokens, start;
    float *encoded, *norm;
    kept before;
} keep;

static void expect_kept(const keep *p, estimate *keys, estimate *values) {
    int dim = p->block.head_dim, heads = p->block.kv_heads, cols = p->k.matrix.cols, length = p->before.length;
    estimate both[2] = {estimate_make(heads * dim), estimate_make(heads * dim)};
    kept_numbers(&p->before, keys, values);
    for (int t = 0; t < p->tokens; t++) {
        estimate x = estimate_of(p->encoded + t * cols, cols);
        plain_multiply(&p->k, &x, INNER, &both[0]), plain_multiply(&p->v, &x, INNER, &both[1]);
        attend_finish(&p->block, p->norm, heads, &both[0]), attend_finish(&p->block, NULL, heads, &both[1]);
        for (int head = 0; head < heads; head++)
            for (int i = 0; i < 2; i++) {
                estimate from = estimate_at(&both[i], head * dim);
                estimate to = estimate_at(i ? values : keys, (head * length + p->start + t) * dim);
                kept_rounded(&p->before, &from, &to);
            }
        estimate_free(&x);
    }
    estimate_free(&both[0]), estimate_free(&both[1]);
}

static void run_keep(const keep *p) {
    int length = p->before.length, stop = p->start + p->tokens, count = p->before.heads * length * p->before.dim;
    int cols = p->k.matrix.cols;
    estimate keys = estimate_make(count), values = estimate_make(count);
    kept first = {0};
    expect_kept(p, &keys, &values);
    for (int e = 0; e < engine_count; e++) {
        const engine *on = &engines[e];
        kept found = kept_copy(&p->before), alone = kept_copy(&p->before);
        require(on, !moert_keep(on->pool, &p->block, p->tokens, p->encoded, p->start, &found.at), "no memory");
        kept_check(on, &found, &p->before, p->start, stop, &keys, &values);
        for (int t = 0; t < p->tokens; t++) {
            int failed = moert_keep(on->pool, &p->block, 1, p->encoded + t * cols, p->start + t, &alone.at);
            require(on, !failed, "no memory");
        }
        require(on, kept_equal(&found, &alone), "one token after the other gives other keys or values");
        if (!e) first = kept_copy(&found);
        require(on, kept_equal(&found, &first), "keys or values differ from the first engine's");
        kept_free(&found), kept_free(&alone);
    }
    kept_free(&first);
    estimate_free(&keys), estimate_free(&values);
}

static void one_keep(int number) {
    static const int kinds[] = {MOERT_F32, 8, MOERT_F16, 4, MOERT_BF16, 3, 2}, dims[] = {1, 2, 6, 15, 16, 20, 64, 128};
    keep p = {.tokens = (int[]){1, 2, 5, 63, 65}[draw(5)]};
    p.start = (int[]){0, 0, 1, 63, 64, 100}[draw(6)];
    int heads = 1 + draw(3), dim = dims[draw(8)], cols = (int[]){3, 32, 70, 96}[draw(4)];
    int style = number % 2 ? EXTREME : PLAIN, stop = p.start + p.tokens, later = draw(2) ? draw(70) : 0;
    p.k = matrix_make(kinds[number % 7], heads * dim, cols, 32, style);
    p.v = matrix_make(kinds[draw(7)], heads * dim, cols, 16, style);
    p.encoded = draw_floats(p.tokens * cols);
    p.block = (moert_attention){.k = p.k.matrix, .v = p.v.matrix, .heads = heads, .kv_heads = heads, .head_dim = dim};
    p.block.eps = 1e-5f, p.block.clip = draw(3) ? INFINITY : 0.75f, p.block.norm_each = draw(2);
    if (draw(2)) p.block.k_norm = p.norm = draw_floats(p.block.norm_each ? dim : heads * dim);
    p.before = kept_make(heads, dim, stop + later, p.start, stop);
    describe("keep: kinds %d and %d, style %d, %d heads of %d, %d cols, %d tokens from %d, length %d, small %d, norm %d "
             "each %d, clip %g", p.k.matrix.kind, p.v.matrix.kind, style, heads, dim, cols, p.tokens, p.start, p.before.length, p.before.small,
             p.norm != NULL, p.block.norm_each, p.block.clip);
    run_keep(&p);
    matrix_free(&p.k), matrix_free(&p.v);
    kept_free(&p.before);
    free(p.encoded), free(p.norm);
}

void keep_cases(void) {
    for (int number = 0; number < 42; number++) {
        seed(6500 + (uint64_t)number);
        one_keep(number);
    }
}
