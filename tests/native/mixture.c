/* moert_mixture: widths mixed between experts and projections, biases, empty experts, every activation. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"

static const int kinds[] = {2, 3, 4, MOERT_MXFP4, 8, MOERT_F16, MOERT_BF16, MOERT_F32};
static const int groups[] = {0, 16, 32, 64, 128, 10, 48};
enum { MOST_EXPERTS = 8 };

typedef struct {
    int gated, experts, d_model, d_ff, tokens, style;
    moert_act act;
    problem_matrix matrices[MOST_EXPERTS][3]; /* gate, up, down */
    moert_ffn ffn[MOST_EXPERTS];
    int32_t starts[MOST_EXPERTS + 1], *token_of;
    float *weight_of, *x, *before;
} mixture;

/* Each token goes to each expert with a chance of its own, so that some experts have none and some have all. */
static void route(mixture *m) {
    int rows = 0;
    m->token_of = claim((size_t)m->tokens * m->experts * sizeof(int32_t));
    m->weight_of = claim((size_t)m->tokens * m->experts * sizeof(float));
    for (int e = 0; e < m->experts; e++) {
        int chance = (int[]){0, 1, 2, 4, 4}[draw(5)];
        m->starts[e] = rows;
        for (int t = 0; t < m->tokens; t++)
            if (draw(4) < chance) m->token_of[rows] = t, m->weight_of[rows++] = draw(9) ? draw_float() : 0;
    }
    m->starts[m->experts] = rows;
    m->token_of = realloc(m->token_of, rows ? (size_t)rows * sizeof(int32_t) : 1);
    m->weight_of = realloc(m->weight_of, rows ? (size_t)rows * sizeof(float) : 1);
}

static void make(mixture *m, const int *allowed, int count) {
    for (int e = 0; e < m->experts; e++) {
        memset(&m->ffn[e], 0, sizeof m->ffn[e]);
        for (int p = m->gated ? 0 : 1; p < 3; p++) {
            int rows = p < 2 ? m->d_ff : m->d_model, cols = p < 2 ? m->d_model : m->d_ff;
            int kind = allowed[draw(count)], group = groups[draw(7)];
            m->matrices[e][p] = matrix_make(kind, rows, cols, group, m->style);
        }
        if (m->gated) m->ffn[e].gate = m->matrices[e][0].matrix;
        m->ffn[e].up = m->matrices[e][1].matrix;
        m->ffn[e].down = m->matrices[e][2].matrix;
    }
    route(m);
    m->x = draw_floats(m->tokens * m->d_model);
    m->before = draw_floats(m->tokens * m->d_model);
    if (m->tokens > 1) memset(m->x, 0, (size_t)m->d_model * sizeof(float)); /* a token of zeros */
}

static void add_row(const mixture *m, int expert, int row, estimate *out) {
    int token = m->token_of[row];
    estimate x = estimate_of(m->x + token * m->d_model, m->d_model);
    estimate gate = estimate_make(m->d_ff), up = estimate_make(m->d_ff), hidden = estimate_make(m->d_ff);
    estimate down = estimate_make(m->d_model);
    if (m->gated) plain_multiply(&m->matrices[expert][0], &x, INNER, &gate);
    plain_multiply(&m->matrices[expert][1], &x, INNER, &up);
    plain_activate(&m->act, m->gated ? &gate : NULL, &up, m->d_ff, &hidden);
    plain_multiply(&m->matrices[expert][2], &hidden, FINAL, &down);
    for (int i = 0; i < m->d_model; i++) {
        double weight = m->weight_of[row];
        out->value[token * m->d_model + i] += weight * down.value[i];
        out->error[token * m->d_model + i] += fabs(weight) * (down.error[i] + INNER * fabs(down.value[i]));
    }
    estimate_free(&x), estimate_free(&gate), estimate_free(&up), estimate_free(&hidden), estimate_free(&down);
}

/* One token after the other: the same bits. */
static void run_alone(const mixture *m, const engine *on, const moert_ffn *const *ffn, const float *expected) {
    int32_t starts[MOST_EXPERTS + 1], none[MOST_EXPERTS] = {0};
    float *out = claim((size_t)m->d_model * sizeof *out), weights[MOST_EXPERTS];
    for (int t = 0; t < m->tokens; t++) {
        int rows = 0, at = t * m->d_model;
        for (int e = 0; e < m->experts; e++) {
            starts[e] = rows;
            for (int row = m->starts[e]; row < m->starts[e + 1]; row++)
                if (m->token_of[row] == t) weights[rows++] = m->weight_of[row];
        }
        starts[m->experts] = rows;
        memcpy(out, m->before + at, (size_t)m->d_model * sizeof *out);
        int failed = moert_mixture(on->pool, &m->act, m->experts, ffn, starts, none, weights, m->x + at, 1, out);
        require(on, !failed, "no memory");
        again(on, "output of one token", out, expected + at, m->d_model);
    }
    free(out);
}

/* One expert after the other, and then the sum: the same bits. */
static void run_in_parts(const mixture *m, const engine *engine, const moert_ffn *const *ffn, const float *expected) {
    const int length = m->tokens * m->d_model, rows = m->starts[m->experts];
    float *parts = claim((size_t)rows * m->d_model * sizeof *parts), *out = claim((size_t)length * sizeof *out);
    memcpy(out, m->before, (size_t)length * sizeof *out);
    for (int e = 0; e < m->experts; e++) {
        const int32_t first = m->starts[e], span[] = {0, m->starts[e + 1] - first};
        int failed = moert_parts(engine->pool, &m->act, 1, ffn + e, span, m->token_of + first, m->x,
                                 m->tokens, parts + (size_t)first * m->d_model);
        require(engine, !failed, "no memory");
    }
    moert_add_parts(engine->pool, parts, m->weight_of, m->token_of, rows, m->d_model, out);
    again(engine, "sum of parts", out, expected, length);
    free(parts), free(out);
}

static void run(mixture *m) {
    int length = m->tokens * m->d_model;
    const moert_ffn *ffn[MOST_EXPERTS];
    float *out = claim((size_t)length * sizeof *out), *first = claim((size_t)length * sizeof *first);
    estimate expected = estimate_make(length);
    for (int i = 0; i < length; i++) expected.value[i] = m->before[i], expected.error[i] = INNER * fabs(m->before[i]);
    for (int e = 0; e < m->experts; e++) {
        ffn[e] = &m->ffn[e];
        for (int row = m->starts[e]; row < m->starts[e + 1]; row++) add_row(m, e, row, &expected);
    }
    for (int e = 0; e < engine_count; e++) {
        memcpy(out, m->before, (size_t)length * sizeof *out);
        int failed = moert_mixture(engines[e].pool, &m->act, m->experts, ffn, m->starts, m->token_of,
                                   m->weight_of, m->x, m->tokens, out);
        require(&engines[e], !failed, "no memory");
        check(&engines[e], "output", out, &expected, length);
        agree(&engines[e], "output", out, first, length, m->act.kind == MOERT_GELU ? HERE : EVERYWHERE);
        run_in_parts(m, &engines[e], ffn, out);
        if (m->tokens < 20) run_alone(m, &engines[e], ffn, out);
    }
    for (int e = 0; e < m->experts; e++)
        for (int p = m->gated ? 0 : 1; p < 3; p++) matrix_free(&m->matrices[e][p]);
    estimate_free(&expected);
    free(out), free(first), free(m->token_of), free(m->weight_of), free(m->x), free(m->before);
}

static void mix(int number, int d_model, int d_ff, int tokens, const int *allowed, int count) {
    mixture m = {.gated = number / 4 % 2, .experts = 1 + number % MOST_EXPERTS, .d_model = d_model, .d_ff = d_ff,
                 .tokens = tokens};
    m.act.kind = number % 5, m.act.limit = (float[]){INFINITY, 0.5f, 7, INFINITY}[number / 8 % 4];
    m.act.bound = (float[]){INFINITY, INFINITY, 0.25f}[number / 5 % 3];
    m.act.slope = draw(2) ? 1.702f : 1, m.act.plus = draw(2) ? 0 : 1;
    m.style = number % 16 == 15 ? EXTREME : PLAIN;
    make(&m, allowed, count);
    describe("mixture: activation %d, limit %g, bound %g, slope %g, plus %g, %s, %d experts, %d -> %d, %d tokens, style %d, "
             "widths from %d", m.act.kind, m.act.limit, m.act.bound, m.act.slope, m.act.plus, m.gated ? "gated" : "no gate",
             m.experts, d_model, d_ff, tokens, m.style, allowed[0]);
    run(&m);
}

void mixture_cases(void) {
    static const int sizes[] = {1, 5, 31, 32, 33, 48, 64, 67, 96, 100, 128, 160};
    static const int token_counts[] = {1, 1, 2, 5, 17};
    int number = 0;
    for (int k = 0; k < 8; k++) /* one width alone */
        for (int i = 0; i < 16; i++, number++) {
            seed(2000 + (uint64_t)number);
            int d_model = sizes[draw(12)], d_ff = sizes[draw(12)];
            mix(i, d_model, d_ff, token_counts[draw(5)], &kinds[k], 1);
        }
    for (int i = 0; i < 120; i++, number++) { /* all widths mixed */
        seed(2000 + (uint64_t)number);
        int d_model = sizes[draw(12)], d_ff = sizes[draw(12)];
        mix(i, d_model, d_ff, token_counts[draw(5)], kinds, i % 3 ? 5 : 8);
    }
    for (int i = 0; i < 4; i++) {
        seed(4000 + (uint64_t)i);
        mix(i * 7, 64, 96, 200, kinds, 6);
    }
}
