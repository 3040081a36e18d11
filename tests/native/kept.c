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
    return head * keys->at.value_stride + (int64_t)position * keys->value_dim + feature;
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

/* Numbers that are there before. */
static void draw_kept(kept *made, int head, int at) {
    if (made->small) *key_step(made, head, at) = (uint16_t)(draw_half(PLAIN) & 0x7FFF) / 8;
    if (made->small) *value_step(made, head, at) = (uint16_t)(draw_half(PLAIN) & 0x7FFF) / 8;
    for (int i = 0; i < made->dim; i++) draw_number(made->at.keys, key_place(made, head, at, i), made->small);
    for (int i = 0; i < made->value_dim; i++) draw_number(made->at.values, value_place(made, head, at, i), made->small);
}

kept kept_make(const moert_heads *with, int length, int from, int stop) {
    int64_t room = (int64_t)(length + MOERT_KEYS - 1) / MOERT_KEYS * MOERT_KEYS, keys = room * with->dim;
    int64_t values = (int64_t)length * with->value_dim, others = with->kv - 1;
    kept made = {.heads = with->kv, .dim = with->dim, .value_dim = with->value_dim, .length = length};
    made.small = draw(3) == 0;
    size_t size = made.small ? sizeof(int8_t) : sizeof(uint16_t);
    made.at.key_stride = keys + 7 * draw(2), made.at.value_stride = values + 7 * draw(2);
    made.at.key_step_stride = room + 3 * draw(2), made.at.value_step_stride = length + 3 * draw(2);
    made.bytes[0] = (size_t)(others * made.at.key_stride + keys) * size;
    made.bytes[1] = (size_t)(others * made.at.value_stride + values) * size;
    made.at.keys = nothing(made.bytes[0]), made.at.values = nothing(made.bytes[1]);
    if (made.small) {
        made.bytes[2] = (size_t)(others * made.at.key_step_stride + room) * sizeof(uint16_t);
        made.bytes[3] = (size_t)(others * made.at.value_step_stride + length) * sizeof(uint16_t);
        made.at.key_steps = nothing(made.bytes[2]), made.at.value_steps = nothing(made.bytes[3]);
    }
    for (int head = 0; head < with->kv; head++)
        for (int at = 0; at < length; at++)
            if (at < from || at >= stop) draw_kept(&made, head, at);
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
    double *key = keys->value, *value = values->value;
    for (int head = 0; head < from->heads; head++)
        for (int at = 0; at < from->length; at++) {
            const uint16_t *steps[] = {key_step(from, head, at), value_step(from, head, at)};
            for (int i = 0; i < from->dim; i++) *key++ = number_at(from->at.keys, key_place(from, head, at, i), steps[0]);
            for (int i = 0; i < from->value_dim; i++)
                *value++ = number_at(from->at.values, value_place(from, head, at, i), steps[1]);
        }
    memset(keys->error, 0, (size_t)(key - keys->value) * sizeof(double));
    memset(values->error, 0, (size_t)(value - values->value) * sizeof(double));
}

/* Numbers [length] of one head as they are kept. */
static void round_kept(int small, int length, const estimate *x, estimate *y) {
    double largest = 0;
    if (!small) {
        plain_halves(x, length, y);
        return;
    }
    for (int i = 0; i < length; i++) largest = fmax(largest, fabs(x->value[i]) + x->error[i]);
    for (int i = 0; i < length; i++) {
        y->value[i] = fmax(fmin(x->value[i], 127 * 65504.0), -127 * 65504.0);
        y->error[i] = x->error[i] + 0.51 * largest / 127 + 1e-3 * fabs(x->value[i]) + 127 * 6e-8;
    }
}

void kept_put(const kept *keys, int at, const estimate *key, const estimate *value, estimate *all_keys,
              estimate *all_values) {
    for (int head = 0; head < keys->heads; head++) {
        int place = head * keys->length + at;
        estimate from = estimate_at(key, head * keys->dim), to = estimate_at(all_keys, place * keys->dim);
        round_kept(keys->small, keys->dim, &from, &to);
        from = estimate_at(value, head * keys->value_dim), to = estimate_at(all_values, place * keys->value_dim);
        round_kept(keys->small, keys->value_dim, &from, &to);
    }
}

/* The key and the value of one position of a head are those numbers; they go to `written`. */
static void check_one(const engine *on, const kept *found, kept *written, int head, int at, const estimate *key,
                      const estimate *value) {
    float *keys = claim((size_t)found->dim * sizeof *keys), *values = claim((size_t)found->value_dim * sizeof *values);
    if (found->small) *key_step(written, head, at) = *key_step(found, head, at);
    if (found->small) *value_step(written, head, at) = *value_step(found, head, at);
    for (int i = 0; i < found->dim; i++) {
        int64_t place = key_place(found, head, at, i);
        copy_number(written->at.keys, found->at.keys, place, found->small);
        keys[i] = (float)number_at(found->at.keys, place, key_step(found, head, at));
    }
    for (int i = 0; i < found->value_dim; i++) {
        int64_t place = value_place(found, head, at, i);
        copy_number(written->at.values, found->at.values, place, found->small);
        values[i] = (float)number_at(found->at.values, place, value_step(found, head, at));
    }
    check(on, "key", keys, key, found->dim);
    check(on, "value", values, value, found->value_dim);
    free(keys), free(values);
}

void kept_check(const engine *on, const kept *found, const kept *before, int from, int stop, const estimate *keys,
                const estimate *values) {
    kept written = kept_copy(before);
    for (int head = 0; head < found->heads; head++)
        for (int at = from; at < stop; at++) {
            int place = head * found->length + at;
            estimate key = estimate_at(keys, place * found->dim), value = estimate_at(values, place * found->value_dim);
            check_one(on, found, &written, head, at, &key, &value);
        }
    require(on, kept_equal(found, &written), "a key or value was changed that must stay");
    kept_free(&written);
}

/* Encoded tokens whose keys and values are written from position `start` on. */
typedef struct {
    problem_matrix k, v;
    moert_attention block;
    int tokens, start;
    float *encoded;
    kept before;
} keep;

static void expect_kept(const keep *p, estimate *keys, estimate *values) {
    const moert_heads *h = &p->block.heads;
    int cols = p->k.matrix.cols;
    estimate key = estimate_make(h->kv * h->dim), value = estimate_make(h->kv * h->value_dim);
    kept_numbers(&p->before, keys, values);
    for (int t = 0; t < p->tokens; t++) {
        estimate x = estimate_of(p->encoded + t * cols, cols);
        plain_multiply(&p->k, &x, INNER, &key), plain_multiply(&p->v, &x, INNER, &value);
        plain_finish(NULL, &p->block, t, &p->block.k_norm, h->kv, &key), plain_finish_values(&p->block, &value);
        kept_put(&p->before, p->start + t, &key, &value, keys, values);
        estimate_free(&x);
    }
    estimate_free(&key), estimate_free(&value);
}

static void run_keep(const keep *p) {
    int rows = p->before.heads * p->before.length, stop = p->start + p->tokens, cols = p->k.matrix.cols;
    estimate keys = estimate_make(rows * p->before.dim), values = estimate_make(rows * p->before.value_dim);
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
    static const int kinds[] = {MOERT_F32, 8, MOERT_F16, 4, MOERT_BF16, 3, 2};
    keep p = {.tokens = PICK(1, 2, 5, 63, 65)};
    p.start = PICK(0, 0, 1, 63, 64, 100);
    int heads = 1 + draw(3), dim = PICK(1, 2, 6, 15, 16, 20, 64, 128), cols = PICK(3, 32, 70, 96);
    int value_dim = draw(2) ? dim : PICK(1, 3, 16, 33);
    int style = number % 2 ? EXTREME : PLAIN, stop = p.start + p.tokens, later = draw(2) ? draw(70) : 0;
    moert_attention *b = &p.block;
    p.k = matrix_make(kinds[number % 7], heads * dim, cols, 32, style);
    p.v = matrix_make(kinds[draw(7)], heads * value_dim, cols, 16, style);
    p.encoded = draw_floats(p.tokens * cols);
    b->heads = (moert_heads){.n = heads, .kv = heads, .dim = dim, .value_dim = value_dim};
    b->k = p.k.matrix, b->v = p.v.matrix, b->clip = draw(3) ? INFINITY : 0.75f;
    b->norm_each = draw(2), b->norm_turned = draw(2);
    if (draw(2)) b->k_norm = norm_make(b->norm_each ? dim : heads * dim, 1e-5f);
    if (draw(2)) b->v_norm = norm_make(value_dim, 1e-5f);
    p.before = kept_make(&b->heads, stop + later, p.start, stop);
    describe("keep: kinds %d and %d, style %d, %d heads of %d and %d, %d cols, %d tokens from %d, length %d, small %d, "
             "norm %d each %d, norm of values %d, clip %g", b->k.kind, b->v.kind, style, heads, dim, value_dim, cols,
             p.tokens, p.start, p.before.length, p.before.small, b->k_norm.weight != NULL, b->norm_each,
             b->v_norm.weight != NULL, b->clip);
    run_keep(&p);
    matrix_free(&p.k), matrix_free(&p.v);
    norm_free(&b->k_norm), norm_free(&b->v_norm);
    kept_free(&p.before);
    free(p.encoded);
}

void keep_cases(void) {
    for (int number = 0; number < 60; number++) {
        seed(6500 + (uint64_t)number);
        one_keep(number);
    }
}
