/* moert_fire and moert_project: neurons in blocks of any size, at odd shapes, some of them not there. Each piece is a buffer of
 * its own, exactly sized. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"

static const int kinds[] = {2, 3, 4, 8, MOERT_F16, MOERT_BF16};
static const int groups[] = {0, 16, 32, 64, 128, 10, 48};
static const int widths[] = {1, 7, 16, 31, 33, 48, 63, 64, 65, 100, 128, 129, 160, 257, 300};
#define COUNT(list) ((int)(sizeof(list) / sizeof *(list)))
enum { MOST_BLOCKS = 80, ABSENT = -1 };

typedef struct {
    moert_neurons shape;
    int blocks, rows_bytes, columns_bytes;
    problem_matrix gate, up, down; /* [d_ff, d_model]; gate.weight NULL without one */
    uint8_t *rows[MOST_BLOCKS], *columns[MOST_BLOCKS];
    const uint8_t *base; /* the piece that lies first in memory */
    int64_t rows_at[MOST_BLOCKS], columns_at[MOST_BLOCKS];
} neurons;

static int row_size(const moert_matrix *m) {
    if (m->kind >= MOERT_F16) return 2 * m->cols;
    return m->kind == 3 ? (m->cols + 3) / 4 + (m->cols + 7) / 8 : (m->cols * m->kind + 7) / 8;
}

static int take(int64_t *place, int *end, int bytes) {
    *place = *end = (*end + 7) / 8 * 8;
    return *end += bytes;
}

/* Where the parts of a matrix lie in a piece that has `end` bytes so far. */
static moert_place place_matrix(const moert_matrix *m, int per_block, int *end) {
    moert_place place = {.bias = ABSENT, .kind = m->kind, .group = m->group};
    int scales = 2 * per_block * ((m->cols + m->group - 1) / m->group);
    take(&place.data, end, per_block * row_size(m));
    if (m->kind < MOERT_F16) take(&place.scale, end, scales), take(&place.minimum, end, scales);
    if (m->bias) take(&place.bias, end, 4 * per_block);
    return place;
}

static void put(uint8_t *to, const void *from, int row_bytes, int first, int count) {
    memcpy(to, (const uint8_t *)from + (size_t)first * row_bytes, (size_t)count * row_bytes);
}

static void put_block(const moert_matrix *m, const moert_place *place, int first, int count, uint8_t *piece) {
    int scales = 2 * ((m->cols + m->group - 1) / m->group);
    put(piece + place->data, m->data, row_size(m), first, count);
    if (m->kind < MOERT_F16) put(piece + place->scale, m->scale, scales, first, count);
    if (m->kind < MOERT_F16) put(piece + place->minimum, m->minimum, scales, first, count);
    if (m->bias) put(piece + place->bias, m->bias, 4, first, count);
}

static neurons neurons_make(int d_model, int d_ff, int per_block, int gated, const int *kind, int group, int style) {
    neurons n = {.shape = {.d_model = d_model, .d_ff = d_ff, .block_rows = per_block}};
    n.blocks = (d_ff + per_block - 1) / per_block;
    if (gated) n.gate = matrix_make(kind[0], d_ff, d_model, group, style);
    n.up = matrix_make(kind[1], d_ff, d_model, group, style);
    n.down = matrix_make(kind[2], d_ff, d_model, group, style);
    free((void *)n.down.matrix.bias), n.down.matrix.bias = NULL;
    if (gated) n.shape.gate = place_matrix(&n.gate.matrix, per_block, &n.rows_bytes);
    n.shape.up = place_matrix(&n.up.matrix, per_block, &n.rows_bytes);
    n.shape.down = place_matrix(&n.down.matrix, per_block, &n.columns_bytes);
    for (int k = 0; k < n.blocks; k++) {
        int first = k * per_block, count = d_ff - first < per_block ? d_ff - first : per_block;
        n.rows[k] = claim((size_t)n.rows_bytes), n.columns[k] = claim((size_t)n.columns_bytes);
        memset(n.rows[k], 0, (size_t)n.rows_bytes), memset(n.columns[k], 0, (size_t)n.columns_bytes);
        if (gated) put_block(&n.gate.matrix, &n.shape.gate, first, count, n.rows[k]);
        put_block(&n.up.matrix, &n.shape.up, first, count, n.rows[k]);
        put_block(&n.down.matrix, &n.shape.down, first, count, n.columns[k]);
        if (!k || n.rows[k] < n.base) n.base = n.rows[k];
        if (n.columns[k] < n.base) n.base = n.columns[k];
    }
    for (int k = 0; k < n.blocks; k++) n.rows_at[k] = n.rows[k] - n.base, n.columns_at[k] = n.columns[k] - n.base;
    return n;
}

static void neurons_free(neurons *n) {
    for (int k = 0; k < n->blocks; k++) free(n->rows[k]), free(n->columns[k]);
    if (n->gate.weight) matrix_free(&n->gate);
    matrix_free(&n->up), matrix_free(&n->down);
}

/* What whole matrices give, and the activation. */
static void fire_whole(const neurons *n, const engine *on, const moert_act *act, const float *x, int tokens, float *hidden) {
    int length = tokens * n->shape.d_ff;
    float *gate = claim((size_t)length * sizeof *gate), *outputs[] = {hidden, gate};
    const moert_matrix *matrices[] = {&n->up.matrix, &n->gate.matrix};
    moert_linear(on->pool, n->gate.weight ? 2 : 1, matrices, x, tokens, outputs);
    for (int i = 0; i < length; i++) {
        float up = hidden[i], bent = fminf(n->gate.weight ? gate[i] : up, act->limit);
        float a = bent > 0 ? act->kind == MOERT_RELU_SQUARED ? bent * bent : bent : 0;
        hidden[i] = n->gate.weight ? a * (fmaxf(fminf(up, act->limit), -act->limit) + act->plus) : a;
    }
    free(gate);
}

/* Some blocks alone: the same bits, and 0 for the others; and one token alone. */
static void fire_some(const neurons *n, const engine *on, const moert_act *act, const float *x, int tokens,
                      const float *expected) {
    int d_ff = n->shape.d_ff, length = tokens * d_ff;
    float *hidden = claim((size_t)length * sizeof *hidden), *some = claim((size_t)length * sizeof *some);
    int64_t at[MOST_BLOCKS];
    for (int k = 0; k < n->blocks; k++) at[k] = (k * 7 + n->blocks) % 3 ? n->rows_at[k] : ABSENT;
    for (int i = 0; i < length; i++) some[i] = at[i % d_ff / n->shape.block_rows] < 0 ? 0 : expected[i];
    fill(hidden, length);
    require(on, !moert_fire(on->pool, &n->shape, act, n->base, at, x, tokens, hidden), "no memory");
    again(on, "hidden of some blocks", hidden, some, length);
    for (int t = 0; t < tokens && tokens < 20; t++) {
        fill(hidden, d_ff);
        moert_fire(on->pool, &n->shape, act, n->base, n->rows_at, x + t * n->shape.d_model, 1, hidden);
        again(on, "hidden of one token", hidden, expected + t * d_ff, d_ff);
    }
    free(hidden), free(some);
}

static void fire(int number, int d_model, int d_ff, int per_block, int group, int tokens) {
    int kind[] = {kinds[number % COUNT(kinds)], kinds[draw(COUNT(kinds))], 4}, gated = number / 6 % 2;
    moert_act act = {number / 2 % 2 ? MOERT_RELU : MOERT_RELU_SQUARED, number % 5 ? INFINITY : 0.5f, 1, gated && number % 3 == 0,
                     INFINITY};
    neurons n = neurons_make(d_model, d_ff, per_block, gated, kind, group, number % 8 == 7 ? EXTREME : PLAIN);
    int length = tokens * d_ff;
    float *x = draw_floats(tokens * d_model), *hidden = claim((size_t)length * sizeof *hidden);
    float *first = claim((size_t)length * sizeof *first), *whole = claim((size_t)length * sizeof *whole);
    describe("fire: kinds %d, %d, %d -> %d in blocks of %d, group %d, %d tokens, %s, activation %d", kind[0], kind[1],
             d_model, d_ff, per_block, group, tokens, gated ? "gated" : "no gate", act.kind);
    for (int e = 0; e < engine_count; e++) {
        fill(hidden, length);
        require(&engines[e], !moert_fire(engines[e].pool, &n.shape, &act, n.base, n.rows_at, x, tokens, hidden), "no memory");
        agree(&engines[e], "hidden", hidden, first, length, EVERYWHERE);
        fire_whole(&n, &engines[e], &act, x, tokens, whole);
        again(&engines[e], "hidden of whole matrices", whole, hidden, length);
        fire_some(&n, &engines[e], &act, x, tokens, hidden);
    }
    neurons_free(&n);
    free(x), free(hidden), free(first), free(whole);
}

void fire_cases(void) {
    for (int number = 0; number < 150; number += apart) {
        seed(12000 + (uint64_t)number);
        int d_model = widths[draw(COUNT(widths))], d_ff = 1 + draw(75), per_block = 1 + draw(d_ff < 9 ? d_ff : 9);
        int tokens = PICK(1, 1, 2, 5, 17, 40);
        fire(number, d_model, d_ff, per_block, groups[draw(COUNT(groups))], tokens);
    }
    seed(12900);
    fire(3, 2048, 70, 14, 64, 1);
    fire(2, 576, 64, 33, 64, 33);
}

/* Neuron after neuron, rounded as moert.h says; and in double precision. */
static void project_whole(const neurons *n, const engine *on, const float *hidden, const float *bias, float *y, estimate *exact) {
    int d_ff = n->shape.d_ff, d_model = n->shape.d_model;
    float *column = claim((size_t)d_model * sizeof *column);
    for (int c = 0; c < d_model; c++) y[c] = 0, exact->value[c] = exact->error[c] = 0;
    for (int i = 0; i < d_ff; i++) {
        int64_t row = i;
        moert_rows(on->pool, &n->down.matrix, 1, &row, column);
        for (int c = 0; c < d_model; c++) {
            y[c] = fmaf(hidden[i], column[c], y[c]);
            exact->value[c] += (double)hidden[i] * n->down.weight[i * d_model + c];
            exact->error[c] += FINAL * fabs((double)hidden[i]) * n->down.magnitude[i * d_model + c];
        }
    }
    for (int c = 0; c < d_model; c++) {
        y[c] = y[c] + 0.0f + (bias ? bias[c] : 0.0f);
        exact->value[c] += bias ? bias[c] : 0, exact->error[c] += bias ? FINAL * fabs(bias[c]) : 0;
    }
    free(column);
}

/* Pieces of which no neuron fired need not be there; one token alone gets the same. */
static void project_some(const neurons *n, const engine *on, const float *hidden, int tokens, const float *bias,
                         const float *expected) {
    int d_ff = n->shape.d_ff, d_model = n->shape.d_model;
    float *y = claim((size_t)d_model * sizeof *y);
    for (int t = 0; t < tokens && tokens < 20; t++) {
        int64_t at[MOST_BLOCKS];
        int one = ABSENT;
        for (int k = 0; k < n->blocks; k++) at[k] = ABSENT;
        for (int i = 0; i < d_ff; i++)
            if (hidden[t * d_ff + i] != 0) one = i / n->shape.block_rows, at[one] = n->columns_at[one];
        fill(y, d_model);
        require(on, !moert_project(on->pool, &n->shape, n->base, at, hidden + t * d_ff, 1, bias, y), "no memory");
        again(on, "sum of one token", y, expected + t * d_model, d_model);
        if (one == ABSENT) continue;
        at[one] = ABSENT;
        require(on, moert_project(on->pool, &n->shape, n->base, at, hidden + t * d_ff, 1, bias, y) == 1, "a piece is missing");
    }
    free(y);
}

static void project(int number, int kind, int d_model, int d_ff, int per_block, int group, int tokens, int of_ten) {
    neurons n = neurons_make(d_model, d_ff, per_block, 0, (int[]){4, 4, kind}, group, number % 8 == 7 ? EXTREME : PLAIN);
    int length = tokens * d_model;
    float *hidden = draw_floats(tokens * d_ff), *bias = number % 3 ? NULL : draw_floats(d_model);
    float *y = claim((size_t)length * sizeof *y), *first = claim((size_t)length * sizeof *first);
    float *plain = claim((size_t)length * sizeof *plain);
    estimate exact = estimate_make(length);
    describe("project: kind %d, %d -> %d in blocks of %d, group %d, %d tokens, %d of 10 fire", kind, d_ff, d_model, per_block,
             group, tokens, of_ten);
    for (int i = 0; i < tokens * d_ff; i++)
        if (draw(10) >= of_ten) hidden[i] = draw(2) ? 0.0f : -0.0f;
    for (int t = 0; t < tokens; t++) {
        estimate one = estimate_at(&exact, t * d_model);
        project_whole(&n, engines, hidden + t * d_ff, bias, plain + t * d_model, &one);
    }
    for (int e = 0; e < engine_count; e++) {
        fill(y, length);
        require(&engines[e], !moert_project(engines[e].pool, &n.shape, n.base, n.columns_at, hidden, tokens, bias, y), "no memory");
        check(&engines[e], "sum", y, &exact, length);
        agree(&engines[e], "sum", y, first, length, EVERYWHERE);
        again(&engines[e], "sum of plain steps", plain, y, length);
        project_some(&n, &engines[e], hidden, tokens, bias, y);
    }
    estimate_free(&exact);
    neurons_free(&n);
    free(hidden), free(bias), free(y), free(first), free(plain);
}

void project_cases(void) {
    for (int number = 0; number < 200; number += apart) {
        seed(13000 + (uint64_t)number);
        int d_model = widths[draw(COUNT(widths))], d_ff = 1 + draw(75), per_block = 1 + draw(d_ff < 9 ? d_ff : 9);
        int tokens = PICK(1, 1, 2, 3, 4, 5, 17, 40), of_ten = PICK(0, 1, 3, 10);
        project(number, kinds[number % COUNT(kinds)], d_model, d_ff, per_block, groups[draw(COUNT(groups))], tokens, of_ten);
    }
    for (int k = 0; k < COUNT(kinds); k++) { /* more than is floats at one time, and more than one part for each thread */
        seed(13900 + (uint64_t)k);
        project(k, kinds[k], 1300 + draw(1000), 90, 3, groups[k], 1, 4);
        project(k, kinds[k], 700, 150, 4, groups[draw(COUNT(groups))], 70, 5);
    }
}
