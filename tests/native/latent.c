/* moert_attend_latent: one token or many, with and without q_a and gates, every kind of matrix, keys of 8 and 16 bits. */
#include <math.h>
#include <stdlib.h>

#include "attend.h"

enum { Q_A, Q, Q_TURN, KV_A, K_TURN, KEYS, VALUES, O, GATE, MATRICES };

typedef struct {
    sequence at;
    moert_latent block;
    problem_matrix made[MATRICES];
    int nope, v, rank; /* rank: what q and q_turn get; of q_a if there is one */
} latent;

/* y = the part of a head of the matrix · x of that head */
static void by_head(const latent *l, int which, int head, const estimate *x, estimate *y) {
    int rows = l->made[which].matrix.rows / l->block.heads.n;
    problem_matrix part = matrix_rows(&l->made[which], head * rows, rows);
    plain_multiply(&part, x, INNER, y);
}

/* query [n, dim]: what meets c, and what meets the key that turns */
static void queries(const latent *l, int token, const estimate *hidden, estimate *query) {
    const moert_heads *h = &l->block.heads;
    int dims = l->block.rope_dims, c = h->value_dim;
    estimate low = estimate_make(l->rank), still = estimate_make(h->n * l->nope), turning = estimate_make(h->n * dims);
    const estimate *asked = hidden;
    if (l->block.q_a.data) {
        plain_multiply(&l->made[Q_A], hidden, INNER, &low);
        plain_norm(&low, &l->block.q_norm, 1, l->rank, &low);
        asked = &low;
    }
    plain_multiply(&l->made[Q], asked, INNER, &still), plain_multiply(&l->made[Q_TURN], asked, INNER, &turning);
    if (l->at.turns) plain_turn(&l->at, token, h->n, dims, &turning);
    for (int head = 0; head < h->n; head++) {
        estimate from = estimate_at(&still, head * l->nope), to = estimate_at(query, head * h->dim);
        by_head(l, KEYS, head, &from, &to);
        for (int i = 0; i < dims; i++) {
            to.value[c + i] = turning.value[head * dims + i];
            to.error[c + i] = turning.error[head * dims + i];
        }
    }
    plain_query_scale(&l->at, token, h->n * h->dim, query);
    estimate_free(&low), estimate_free(&still), estimate_free(&turning);
}

static reading project(const latent *l) {
    const sequence *s = &l->at;
    const moert_heads *h = &l->block.heads;
    int c = h->value_dim;
    reading made = reading_make(s);
    estimate hidden = estimate_make(s->d_model), key = estimate_make(h->dim);
    for (int t = 0; t < s->tokens; t++) {
        estimate x = estimate_of(s->x + t * s->d_model, s->d_model), turning = estimate_at(&key, c);
        estimate query = estimate_at(&made.queries, t * h->n * h->dim);
        plain_norm(&x, &l->block.norm, 1, s->d_model, &hidden);
        queries(l, t, &hidden, &query);
        plain_multiply(&l->made[KV_A], &hidden, INNER, &key), plain_multiply(&l->made[K_TURN], &hidden, INNER, &turning);
        plain_norm(&key, &l->block.kv_norm, 1, c, &key);
        if (s->turns) plain_turn(s, t, 1, s->rope_dims, &turning);
        kept_put(&s->before, s->start + t, &key, &key, &made.keys, &made.values);
        estimate_free(&x);
    }
    estimate_free(&hidden), estimate_free(&key);
    return made;
}

/* What heads read, times the sigmoid of the gate of each. */
static void gate_heads(const latent *l, int token, estimate *values) {
    const sequence *s = &l->at;
    int n = l->block.heads.n;
    estimate x = estimate_of(s->x + token * s->d_model, s->d_model), hidden = estimate_make(s->d_model);
    estimate gate = estimate_make(n);
    plain_norm(&x, &l->block.norm, 1, s->d_model, &hidden);
    plain_multiply(&l->made[GATE], &hidden, INNER, &gate);
    plain_sigmoid(&gate, n, &gate);
    for (int i = 0; i < n * l->v; i++) {
        double value = values->value[i], by = gate.value[i / l->v], off = gate.error[i / l->v];
        values->value[i] = value * by;
        values->error[i] = values->error[i] * (by + off) + fabs(value) * off;
    }
    estimate_free(&x), estimate_free(&hidden), estimate_free(&gate);
}

static void answer(const latent *l, const reading *r, estimate *out) {
    const sequence *s = &l->at;
    int n = r->heads->n, c = r->heads->value_dim;
    estimate mixed = estimate_make(n * c), values = estimate_make(n * l->v), made = estimate_make(s->d_model);
    for (int t = 0; t < s->tokens; t++) {
        estimate y = estimate_at(out, t * s->d_model);
        plain_heads(s, r, t, &mixed);
        for (int head = 0; head < n; head++) {
            estimate from = estimate_at(&mixed, head * c), to = estimate_at(&values, head * l->v);
            by_head(l, VALUES, head, &from, &to);
        }
        if (l->block.gate.data) gate_heads(l, t, &values);
        plain_multiply(&l->made[O], &values, FINAL, &made);
        plain_join(s, t, &l->block.after, l->block.add, &made, &y);
    }
    estimate_free(&mixed), estimate_free(&values), estimate_free(&made);
}

/* `kind` of all matrices; 0: each has its own. */
static void draw_weights(latent *l, int kind, int with_q_a) {
    moert_latent *b = &l->block;
    int n = b->heads.n, c = b->heads.value_dim, d_model = l->at.d_model, dims = b->rope_dims;
    const int shapes[MATRICES][2] = {{l->rank, d_model}, {n * l->nope, l->rank}, {n * dims, l->rank}, {c, d_model},
                                     {dims, d_model}, {n * c, l->nope}, {n * l->v, c}, {d_model, n * l->v}, {n, d_model}};
    moert_matrix *places[MATRICES] = {&b->q_a, &b->q, &b->q_turn, &b->kv_a, &b->k_turn, &b->keys, &b->values, &b->o,
                                      &b->gate};
    const int stop = draw(2) ? GATE : MATRICES;
    for (int i = with_q_a ? Q_A : Q; i < stop; i++) {
        int of = kind ? kind : PICK(2, 3, 4, 8, -4, -6, -8, MOERT_F16, MOERT_BF16, MOERT_F32), group = PICK(0, 16, 32, 64);
        l->made[i] = matrix_make(of, shapes[i][0], shapes[i][1], group, PLAIN);
        *places[i] = l->made[i].matrix;
    }
    b->norm = norm_make(d_model, 1e-5f), b->kv_norm = norm_make(c, 1e-5f), b->add = draw(2) ? 1 : draw_float();
    if (with_q_a) b->q_norm = norm_make(l->rank, 1e-5f);
    if (draw(3) == 0) b->after = norm_make(d_model, 1e-5f);
}

static void free_weights(latent *l) {
    moert_norm *norms[] = {&l->block.norm, &l->block.q_norm, &l->block.kv_norm, &l->block.after};
    for (int i = 0; i < 4; i++) norm_free(norms[i]);
    for (int i = 0; i < MATRICES; i++) matrix_free(&l->made[i]);
}

/* The scale is such that scores reach `most`. */
static void run_problem(latent *l, int kind, int with_q_a, float most) {
    sequence *s = &l->at;
    moert_latent *b = &l->block;
    moert_heads *h = &b->heads;
    l->rank = with_q_a ? l->rank : s->d_model;
    s->latent = b, s->rope_dims = b->rope_dims;
    draw_weights(l, kind, with_q_a);
    draw_sequence(s);
    estimate out = estimate_make(s->tokens * s->d_model);
    reading r = project(l);
    h->scale = (float)(most / (reading_reach(s, &r) + 1e-30));
    answer(l, &r, &out);
    describe("latent: kind %d, d_model %d, q_a %d, %d heads of %d and %d, c %d, values of %d, %d tokens from %d, length %d, "
             "causal %d, window %d, chunk %d, small %d, after %d, gate %d, turns %d, sinks %d, bias %d, query_scale %d, softcap %g, "
             "add %g, scores to %g", kind, s->d_model, with_q_a ? l->rank : 0, h->n, l->nope, b->rope_dims, h->value_dim, l->v,
             s->tokens, s->start, s->length, h->causal, h->window, h->chunk, s->before.at.small, b->after.weight != NULL,
             b->gate.data != NULL, s->turns != NULL, h->sinks != NULL, s->bias != NULL, s->query_scale != NULL, h->softcap, b->add, most);
    run_sequence(s, &r, &out);
    reading_free(&r);
    estimate_free(&out);
    free_weights(l);
    sequence_free(s);
}

static void one_latent(int number) {
    static const int kinds[] = {MOERT_F32, 8, MOERT_F16, 4, MOERT_BF16, 3, 2, 0, -4, -8};
    latent l = {.at = {.d_model = PICK(3, 8, 33, 64, 96), .own = 1}};
    l.nope = PICK(1, 5, 16, 33, 64), l.v = PICK(1, 6, 16, 32);
    moert_heads *h = &l.block.heads;
    l.block.rope_dims = PICK(2, 6, 16), l.rank = PICK(4, 24, 32, 70);
    h->n = PICK(1, 2, 3, 5, 8), h->kv = 1, h->value_dim = PICK(2, 15, 16, 32, 64);
    h->dim = h->value_dim + l.block.rope_dims;
    draw_heads(&l.at, h);
    run_problem(&l, kinds[number % 10], number / 10 % 2, (float)PICK(1, 4, 30));
}

/* Large enough that all threads have a share of each step. */
static void large(int kind, int with_q_a) {
    latent l = {.at = {.d_model = 160, .own = 1, .tokens = 66, .start = 70, .length = 136}};
    l.nope = 64, l.v = 64, l.rank = 96;
    l.block.rope_dims = 32;
    l.block.heads = (moert_heads){.n = 6, .kv = 1, .dim = 160, .value_dim = 128, .causal = 1};
    run_problem(&l, kind, with_q_a, 6);
}

void latent_cases(void) {
    for (int number = 0; number < 160; number += apart) {
        seed(10000 + (uint64_t)number);
        one_latent(number);
    }
    for (int number = 0; number < 2; number += apart) {
        seed(10400 + (uint64_t)number);
        large(number ? 4 : MOERT_F32, number);
    }
}
