/* moert_attend: one token or many, own or given keys, grouped heads, norms, limits, positions, windows, biases. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attend.h"

#define PICK(...) (((const int[]){__VA_ARGS__})[draw((int)(sizeof((const int[]){__VA_ARGS__}) / sizeof(int)))])

/* 1 .. most tokens at a time; `out` takes what comes out. */
static void run_pieces(const attend *a, const engine *on, int most, kept *keys, float *out) {
    const float *bias = a->bias ? a->bias + a->bias_middle : NULL;
    memcpy(out, a->x, (size_t)(a->tokens * a->d_model) * sizeof *out);
    for (int t = 0, stop; t < a->tokens; t = stop) {
        int n = most < a->tokens ? 1 + draw(most) : a->tokens;
        stop = t + n < a->tokens ? t + n : a->tokens;
        int length = a->own && a->block.causal ? a->start + stop : a->length;
        const float *turns = a->turns ? a->turns + t * a->block.rope_dims : NULL;
        int failed = moert_attend(on->pool, &a->block, stop - t, out + t * a->d_model, &keys->at, a->start + t, length,
                                  turns, bias, a->bias_stride);
        require(on, !failed, "no memory");
    }
}

/* In pieces of `most` tokens: the same bits. Where a token sees later ones too, their keys must be there before. */
static void run_again(const attend *a, const engine *on, int most, const kept *found, const float *expected) {
    float *out = claim((size_t)(a->tokens * a->d_model) * sizeof *out);
    kept keys = kept_copy(a->block.causal ? &a->before : found);
    run_pieces(a, on, most, &keys, out);
    again(on, most == 1 ? "output of one token" : "output of a piece", out, expected, a->tokens * a->d_model);
    require(on, kept_equal(&keys, found), "other keys or values in pieces");
    kept_free(&keys);
    free(out);
}

static void run_attend(const attend *a, const attend_input *in) {
    int length = a->tokens * a->d_model, stop = a->own ? a->start + a->tokens : a->start;
    float *out = claim((size_t)length * sizeof *out), *first_out = claim((size_t)length * sizeof *first_out);
    estimate expected = estimate_make(length);
    kept first = {0};
    attend_answer(a, in, &expected);
    for (int e = 0; e < engine_count; e++) {
        const engine *on = &engines[e];
        kept found = kept_copy(&a->before);
        run_pieces(a, on, a->tokens, &found, out);
        kept_check(on, &found, &a->before, a->start, stop, &in->keys, &in->values);
        check(on, "output", out, &expected, length);
        if (!e) first = kept_copy(&found);
        require(on, kept_equal(&found, &first), "keys or values differ from the first engine's");
        agree(on, "output", out, first_out, length, a->block.softcap > 0 ? HERE : EVERYWHERE);
        if (a->tokens > 1) run_again(a, on, e % 2 ? 1 : a->tokens / 2 + 1, &found, out);
        kept_free(&found);
    }
    kept_free(&first);
    estimate_free(&expected);
    free(out), free(first_out);
}

/* Cosines and sines of angles that are known by the tangent of their half. */
static float *draw_turns(int tokens, int dims) {
    float *turns = claim((size_t)(tokens * dims) * sizeof *turns);
    for (int t = 0; t < tokens; t++)
        for (int i = 0; i < dims / 2; i++) {
            double half = 2 * draw_float();
            turns[t * dims + i] = (float)((1 - half * half) / (1 + half * half));
            turns[t * dims + dims / 2 + i] = (float)(2 * half / (1 + half * half));
        }
    return turns;
}

/* For all distances from a query to a key that it sees. */
static void draw_bias(attend *a) {
    int last = a->start + a->tokens - 1, window = a->block.window;
    int after = a->block.causal || a->length - 1 < a->start ? 0 : a->length - 1 - a->start;
    a->bias_middle = window && window <= last ? window - 1 : last;
    a->bias_stride = a->bias_middle + 1 + after;
    a->bias = draw_floats(a->block.heads * a->bias_stride);
}

static void draw_weights(attend *a, int kind, int value_style) {
    moert_attention *b = &a->block;
    int inner = b->heads * b->head_dim, narrow = b->kv_heads * b->head_dim;
    a->q = matrix_make(kind, inner, a->d_model, 32, PLAIN), a->o = matrix_make(kind, a->d_model, inner, 0, PLAIN);
    if (a->own) {
        a->k = matrix_make(kind, narrow, a->d_model, 16, PLAIN);
        a->v = matrix_make(draw(2) ? kind : 8, narrow, a->d_model, 0, value_style);
    }
    b->q = a->q.matrix, b->k = a->k.matrix, b->v = a->v.matrix, b->o = a->o.matrix;
    b->norm = a->norm = draw_floats(a->d_model);
    if (draw(2)) {
        b->norm_each = draw(2);
        b->q_norm = a->q_norm = draw_floats(b->norm_each ? b->head_dim : inner);
        b->k_norm = a->k_norm = draw_floats(b->norm_each ? b->head_dim : narrow);
    }
    if (draw(3) == 0) b->sinks = a->sinks = draw_floats(b->heads);
    if (b->rope_dims) a->turns = draw_turns(a->tokens, b->rope_dims);
    if (draw(2)) draw_bias(a);
    a->x = draw_floats(a->tokens * a->d_model);
}

/* The scale is such that scores reach `most`. */
static void run_problem(attend *a, int kind, int value_style, float most) {
    moert_attention *b = &a->block;
    draw_weights(a, kind, value_style);
    a->before = kept_make(b->kv_heads, b->head_dim, a->length, a->start, a->own ? a->start + a->tokens : a->start);
    attend_input in = attend_project(a);
    b->scale = (float)(most / (attend_reach(a, &in) + 1e-30));
    describe("attend: kind %d, values %d, d_model %d, %d heads of %d for %d, %d tokens from %d, length %d, own %d, "
             "causal %d, window %d, small %d, norms %d each %d, rope %d, sinks %d, bias %d, clip %g, softcap %g, scores to %g",
             kind, value_style, a->d_model, b->heads, b->head_dim, b->kv_heads, a->tokens, a->start, a->length, a->own,
             b->causal, b->window, a->before.small, a->q_norm != NULL, b->norm_each, b->rope_dims, a->sinks != NULL, a->bias != NULL,
             b->clip, b->softcap, most);
    run_attend(a, &in);
    attend_input_free(&in);
    matrix_free(&a->q), matrix_free(&a->k), matrix_free(&a->v), matrix_free(&a->o);
    kept_free(&a->before);
    free(a->norm), free(a->q_norm), free(a->k_norm), free(a->sinks), free(a->turns), free(a->bias), free(a->x);
}

static void one_attend(int number) {
    static const int kinds[] = {MOERT_F32, 8, MOERT_F16, 4, MOERT_BF16, 3, 2};
    attend a = {.d_model = PICK(3, 8, 33, 64, 96), .own = number % 5 < 4};
    moert_attention *b = &a.block;
    b->kv_heads = 1 + draw(3), b->heads = b->kv_heads * PICK(1, 1, 2, 3, 4);
    b->head_dim = PICK(2, 5, 6, 8, 15, 16, 20, 36, 64);
    a.tokens = PICK(1, 1, 1, 2, 3, 5, 17, 63, 64, 66), a.start = PICK(0, 0, 0, 1, 5, 62, 63, 64, 65, 127, 128);
    b->causal = draw(4) > 0, b->window = b->causal && draw(2) ? PICK(1, 5, 64, 70) : 0;
    a.length = a.own || b->causal ? a.start + a.tokens + (draw(4) ? 0 : draw(70)) : 1 + draw(200);
    b->rope_dims = (int[]){0, 2, b->head_dim / 2 * 2}[draw(3)];
    b->eps = 1e-5f, b->clip = draw(3) ? INFINITY : 0.75f, b->softcap = draw(3) ? 0 : 3;
    run_problem(&a, kinds[number % 7], number % 6 == 5 ? EXTREME : PLAIN, (float)PICK(1, 4, 30, 200));
}

/* Large enough that all threads have a share of each step. */
static void large(int kind, int causal) {
    attend a = {.d_model = 160, .own = 1, .tokens = 66, .start = 70, .length = 136};
    a.block = (moert_attention){.heads = 6, .kv_heads = 2, .head_dim = 128, .rope_dims = 128, .causal = causal,
                                .eps = 1e-6f, .clip = INFINITY};
    run_problem(&a, kind, PLAIN, 6);
}

void attend_cases(void) {
    for (int number = 0; number < 150; number++) {
        seed(6000 + (uint64_t)number);
        one_attend(number);
    }
    for (int number = 0; number < 2; number++) {
        seed(6300 + (uint64_t)number);
        large(number ? 4 : MOERT_F32, !number);
    }
}
