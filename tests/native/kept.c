/* Keys and values in memory; moert_keep. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attend.h"

/* Where the numbers of a position lie: in its page, behind its beginning. */
typedef struct {
    void *numbers;
    int64_t at;
    float *step;
    int small;
} spot;

static spot spot_of(const kept *keys, int head, int position, int64_t part, int64_t at, int64_t steps) {
    char *page = (char *)keys->pages[position / MOERT_KEYS] + head * keys->at.head;
    float *of_page = (float *)(void *)(page + steps);
    return (spot){page + part, at, of_page + position % MOERT_KEYS, keys->at.small};
}

static spot key_spot(const kept *keys, int head, int position, int feature) {
    int64_t at = (int64_t)feature * MOERT_KEYS + position % MOERT_KEYS;
    return spot_of(keys, head, position, 0, at, keys->at.key_steps);
}

static spot value_spot(const kept *keys, int head, int position, int feature) {
    int64_t at = (int64_t)(position % MOERT_KEYS) * keys->value_dim + feature;
    return spot_of(keys, head, position, keys->at.values, at, keys->at.value_steps);
}

static double number_at(spot from) {
    double number = from.small ? ((const int8_t *)from.numbers)[from.at] : half_value(((const uint16_t *)from.numbers)[from.at]);
    return number * (double)*from.step;
}

static void draw_number(spot to) {
    if (to.small) ((int8_t *)to.numbers)[to.at] = (int8_t)(draw(255) - 127);
    else ((uint16_t *)to.numbers)[to.at] = draw_half(PLAIN);
}

static void copy_number(spot to, spot from) {
    size_t size = to.small ? sizeof(int8_t) : sizeof(uint16_t);
    memcpy((char *)to.numbers + to.at * (int64_t)size, (const char *)from.numbers + from.at * (int64_t)size, size);
    *to.step = *from.step;
}

static float draw_step(const kept *of) {
    return of->at.small ? (float)half_value((uint16_t)(draw_half(PLAIN) & 0x7FFF) / 8) : PICK(0.0625f, 1, 1, 1, 4);
}

/* Numbers that are there before. */
static void draw_kept(kept *made, int head, int at) {
    *key_spot(made, head, at, 0).step = draw_step(made);
    *value_spot(made, head, at, 0).step = draw_step(made);
    for (int i = 0; i < made->dim; i++) draw_number(key_spot(made, head, at, i));
    for (int i = 0; i < made->value_dim; i++) draw_number(value_spot(made, head, at, i));
}

static void pages_make(kept *made) {
    made->pages = claim((size_t)made->count * sizeof *made->pages);
    for (int page = 0; page < made->count; page++) made->pages[page] = claim(made->page_bytes);
    made->at.pages = made->pages;
}

kept kept_make(const moert_heads *with, int length, int from, int stop) {
    kept made = {.heads = with->kv, .dim = with->dim, .value_dim = with->value_dim, .length = length};
    made.count = (length + MOERT_KEYS - 1) / MOERT_KEYS, made.at.small = draw(3) == 0;
    int64_t tokens = MOERT_KEYS, size = made.at.small ? sizeof(int8_t) : sizeof(uint16_t);
    made.at.values = tokens * with->dim * size + 8 * draw(2);
    made.at.key_steps = made.at.values + tokens * with->value_dim * size + 4 * draw(2);
    int64_t steps = tokens * (int64_t)sizeof(float);
    made.at.value_steps = made.at.key_steps + steps + 4 * draw(2);
    made.at.head = made.at.value_steps + steps + 8 * draw(2);
    made.page_bytes = (size_t)((with->kv - 1) * made.at.head + made.at.value_steps + steps);
    pages_make(&made);
    for (int page = 0; page < made.count; page++) memset(made.pages[page], 0xFF, made.page_bytes);
    for (int head = 0; head < with->kv; head++)
        for (int at = 0; at < length; at++)
            if (at < from || at >= stop) draw_kept(&made, head, at);
    return made;
}

kept kept_copy(const kept *from) {
    kept made = *from;
    pages_make(&made);
    for (int page = 0; page < made.count; page++) memcpy(made.pages[page], from->pages[page], made.page_bytes);
    return made;
}

void kept_free(kept *keys) {
    for (int page = 0; page < keys->count; page++) free(keys->pages[page]);
    free(keys->pages);
}

int kept_equal(const kept *a, const kept *b) {
    for (int page = 0; page < a->count; page++)
        if (memcmp(a->pages[page], b->pages[page], a->page_bytes)) return 0;
    return 1;
}

void kept_numbers(const kept *from, estimate *keys, estimate *values) {
    double *key = keys->value, *value = values->value;
    for (int head = 0; head < from->heads; head++)
        for (int at = 0; at < from->length; at++) {
            for (int i = 0; i < from->dim; i++) *key++ = number_at(key_spot(from, head, at, i));
            for (int i = 0; i < from->value_dim; i++) *value++ = number_at(value_spot(from, head, at, i));
        }
    memset(keys->error, 0, (size_t)(key - keys->value) * sizeof(double));
    memset(values->error, 0, (size_t)(value - values->value) * sizeof(double));
}

/* Numbers [length] of one head as they are kept. */
static void round_kept(int small, int length, const estimate *x, estimate *y) {
    double largest = 0;
    for (int i = 0; i < length; i++) largest = fmax(largest, fabs(x->value[i]) + x->error[i]);
    for (int i = 0; i < length; i++) {
        double value = fabs(x->value[i]) + x->error[i];
        y->value[i] = x->value[i];
        y->error[i] = x->error[i] + (small ? 0.51 * largest / 127 + 1e-3 * value : 0x1p-11 * value + 0x1p-15 * largest);
    }
}

void kept_put(const kept *keys, int at, const estimate *key, const estimate *value, estimate *all_keys,
              estimate *all_values) {
    for (int head = 0; head < keys->heads; head++) {
        int place = head * keys->length + at;
        estimate from = estimate_at(key, head * keys->dim), to = estimate_at(all_keys, place * keys->dim);
        round_kept(keys->at.small, keys->dim, &from, &to);
        from = estimate_at(value, head * keys->value_dim), to = estimate_at(all_values, place * keys->value_dim);
        round_kept(keys->at.small, keys->value_dim, &from, &to);
    }
}

/* The key and the value of one position of a head are those numbers; they go to `written`. */
static void check_one(const engine *on, const kept *found, kept *written, int head, int at, const estimate *key,
                      const estimate *value) {
    float *keys = claim((size_t)found->dim * sizeof *keys), *values = claim((size_t)found->value_dim * sizeof *values);
    for (int i = 0; i < found->dim; i++) {
        spot from = key_spot(found, head, at, i);
        copy_number(key_spot(written, head, at, i), from);
        keys[i] = (float)number_at(from);
    }
    for (int i = 0; i < found->value_dim; i++) {
        spot from = value_spot(found, head, at, i);
        copy_number(value_spot(written, head, at, i), from);
        values[i] = (float)number_at(from);
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
             p.tokens, p.start, p.before.length, p.before.at.small, b->k_norm.weight != NULL, b->norm_each,
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
