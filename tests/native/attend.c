/* moert_attend: one token or many, own or given keys, grouped heads, norms, limits, positions, windows, gates. */
#include <math.h>
#include <stdlib.h>

#include "attend.h"

typedef struct {
    sequence at;
    moert_attention block;
    problem_matrix q, k, v, o, gate;
} attention;

void plain_finish(const sequence *s, const moert_attention *b, int token, const moert_norm *norm, int heads,
                  estimate *x) {
    int dim = b->heads.dim, all = heads * dim, width = b->norm_each ? dim : all;
    for (int turned = 0; turned < 2; turned++) {
        for (int at = 0; norm->weight && turned == b->norm_turned && at < all; at += width) {
            estimate part = estimate_at(x, at);
            plain_norm(&part, norm, 1, width, &part);
        }
        if (turned) continue;
        for (int i = 0; i < all; i++) x->value[i] = fmax(fmin(x->value[i], b->clip), -(double)b->clip);
        if (s && s->turns) plain_turn(s, token, heads, dim, x);
    }
}

void plain_finish_values(const moert_attention *b, estimate *x) {
    int dim = b->heads.value_dim, all = b->heads.kv * dim;
    for (int at = 0; b->v_norm.weight && at < all; at += dim) {
        estimate part = estimate_at(x, at);
        plain_norm(&part, &b->v_norm, 1, dim, &part);
    }
    for (int i = 0; i < all; i++) x->value[i] = fmax(fmin(x->value[i], b->clip), -(double)b->clip);
}

/* `hidden` [tokens, d_model]: norm(x) */
static reading project(const attention *a, const estimate *hidden) {
    const sequence *s = &a->at;
    const moert_attention *b = &a->block;
    const moert_heads *h = &b->heads;
    reading made = reading_make(s);
    estimate key = estimate_make(h->kv * h->dim), value = estimate_make(h->kv * h->value_dim);
    for (int t = 0; t < s->tokens; t++) {
        estimate normed = estimate_at(hidden, t * s->d_model), query = estimate_at(&made.queries, t * h->n * h->dim);
        plain_multiply(&a->q, &normed, INNER, &query);
        plain_finish(s, b, t, &b->q_norm, h->n, &query);
        plain_query_scale(s, t, h->n * h->dim, &query);
        if (!s->own) continue;
        plain_multiply(&a->k, &normed, INNER, &key), plain_multiply(&a->v, &normed, INNER, &value);
        plain_finish(s, b, t, &b->k_norm, h->kv, &key), plain_finish_values(b, &value);
        kept_put(&s->before, s->start + t, &key, &value, &made.keys, &made.values);
    }
    estimate_free(&key), estimate_free(&value);
    return made;
}

static void answer(const attention *a, const estimate *hidden, const reading *r, estimate *out) {
    const sequence *s = &a->at;
    int mixes = r->heads->n * r->heads->value_dim;
    estimate mixed = estimate_make(mixes), gate = estimate_make(mixes), made = estimate_make(s->d_model);
    for (int t = 0; t < s->tokens; t++) {
        estimate normed = estimate_at(hidden, t * s->d_model), y = estimate_at(out, t * s->d_model);
        plain_heads(s, r, t, &mixed);
        if (a->block.gate.data) {
            plain_multiply(&a->gate, &normed, INNER, &gate);
            const int gates = a->block.gate.rows;
            plain_sigmoid(&gate, gates, &gate);
            for (int i = 0; i < mixes; i++) {
                const int from = i / (mixes / gates);
                double value = mixed.value[i], by = gate.value[from];
                mixed.value[i] = value * by;
                mixed.error[i] = mixed.error[i] * (by + gate.error[from]) + fabs(value) * gate.error[from];
            }
        }
        plain_multiply(&a->o, &mixed, FINAL, &made);
        plain_join(s, t, &a->block.after, a->block.add, &made, &y);
    }
    estimate_free(&mixed), estimate_free(&gate), estimate_free(&made);
}

static estimate normed_of(const attention *a) {
    int d_model = a->at.d_model, length = a->at.tokens * d_model;
    estimate x = estimate_of(a->at.x, length), made = estimate_make(length);
    for (int at = 0; at < length; at += d_model) {
        estimate token = estimate_at(&x, at), normed = estimate_at(&made, at);
        plain_norm(&token, &a->block.norm, 1, d_model, &normed);
    }
    estimate_free(&x);
    return made;
}

static void draw_weights(attention *a, int kind, int value_style) {
    moert_attention *b = &a->block;
    const moert_heads *h = &b->heads;
    int d_model = a->at.d_model, mixes = h->n * h->value_dim;
    a->q = matrix_make(kind, h->n * h->dim, d_model, 32, PLAIN), a->o = matrix_make(kind, d_model, mixes, 0, PLAIN);
    if (a->at.own) {
        a->k = matrix_make(kind, h->kv * h->dim, d_model, 16, PLAIN);
        a->v = matrix_make(draw(2) ? kind : 8, h->kv * h->value_dim, d_model, 0, value_style);
    }
    if (draw(3) == 0) a->gate = matrix_make(kind, draw(2) ? mixes : h->n, d_model, draw(2) ? 32 : 64, PLAIN);
    b->q = a->q.matrix, b->k = a->k.matrix, b->v = a->v.matrix, b->o = a->o.matrix, b->gate = a->gate.matrix;
    b->norm = norm_make(d_model, 1e-5f), b->add = draw(2) ? 1 : draw_float();
    b->norm_each = draw(2), b->norm_turned = draw(3) == 0;
    if (draw(2)) {
        b->q_norm = norm_make(b->norm_each ? h->dim : h->n * h->dim, 1e-5f);
        b->k_norm = norm_make(b->norm_each ? h->dim : h->kv * h->dim, 1e-5f);
    }
    if (draw(3) == 0) b->v_norm = norm_make(h->value_dim, 1e-5f);
    if (draw(3) == 0) b->after = norm_make(d_model, 1e-5f);
}

static void free_weights(attention *a) {
    moert_norm *norms[] = {&a->block.norm, &a->block.q_norm, &a->block.k_norm, &a->block.v_norm, &a->block.after};
    problem_matrix *matrices[] = {&a->q, &a->k, &a->v, &a->o, &a->gate};
    for (int i = 0; i < 5; i++) norm_free(norms[i]), matrix_free(matrices[i]);
}

/* The scale is such that scores reach `most`. */
static void run_problem(attention *a, int kind, int value_style, float most) {
    sequence *s = &a->at;
    moert_attention *b = &a->block;
    moert_heads *h = &b->heads;
    s->heads = b, s->rope_dims = b->rope_dims;
    draw_weights(a, kind, value_style);
    draw_sequence(s);
    estimate hidden = normed_of(a), out = estimate_make(s->tokens * s->d_model);
    reading r = project(a, &hidden);
    h->scale = (float)(most / (reading_reach(s, &r) + 1e-30));
    answer(a, &hidden, &r, &out);
    describe("attend: kind %d, values %d, d_model %d, %d heads of %d and %d for %d, %d tokens from %d, length %d, own %d, "
             "causal %d, window %d, chunk %d, small %d, norms %d each %d turned %d, of values %d, after %d, gate %d, rope %d, "
             "sinks %d, bias %d, query_scale %d, clip %g, softcap %g, add %g, scores to %g", kind, value_style, s->d_model, h->n,
             h->dim, h->value_dim, h->kv, s->tokens, s->start, s->length, s->own, h->causal, h->window, h->chunk,
             s->before.at.small, b->q_norm.weight != NULL, b->norm_each, b->norm_turned, b->v_norm.weight != NULL,
             b->after.weight != NULL, b->gate.data != NULL, s->turns ? b->rope_dims : 0, h->sinks != NULL, s->bias != NULL,
             s->query_scale != NULL, b->clip, h->softcap, b->add, most);
    run_sequence(s, &r, &out);
    reading_free(&r);
    estimate_free(&hidden), estimate_free(&out);
    free_weights(a);
    sequence_free(s);
}

static void one_attend(int number) {
    static const int kinds[] = {MOERT_F32, 8, MOERT_F16, 4, MOERT_BF16, 3, 2};
    attention a = {.at = {.d_model = PICK(3, 8, 33, 64, 96), .own = number % 5 < 4}};
    moert_heads *h = &a.block.heads;
    h->kv = 1 + draw(3), h->n = h->kv * PICK(1, 1, 2, 3, 4);
    h->dim = PICK(2, 5, 6, 8, 15, 16, 20, 36, 64), h->value_dim = draw(3) ? h->dim : PICK(1, 3, 16, 24, 33);
    draw_heads(&a.at, h);
    a.block.rope_dims = (int[]){0, 2, h->dim / 2 * 2}[draw(3)], a.block.clip = draw(3) ? INFINITY : 0.75f;
    run_problem(&a, kinds[number % 7], number % 6 == 5 ? EXTREME : PLAIN, (float)PICK(1, 4, 30, 200));
}

/* Large enough that all threads have a share of each step. */
static void large(int kind, int causal) {
    attention a = {.at = {.d_model = 160, .own = 1, .tokens = 66, .start = 70, .length = 136}};
    a.block = (moert_attention){.rope_dims = 128, .clip = INFINITY};
    a.block.heads = (moert_heads){.n = 6, .kv = 2, .dim = 128, .value_dim = 128, .causal = causal};
    run_problem(&a, kind, PLAIN, 6);
}

void attend_cases(void) {
    for (int number = 0; number < 300; number += apart) {
        seed(6000 + (uint64_t)number);
        one_attend(number);
    }
    for (int number = 0; number < 2; number += apart) {
        seed(6400 + (uint64_t)number);
        large(number ? 4 : MOERT_F32, !number);
    }
}
