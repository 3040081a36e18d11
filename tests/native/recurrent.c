/* moert_convolve, moert_delta_rule, moert_scan_tokens: all tokens at once and a few in each call, which is the same. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"

/* Reads tokens first .. stop - 1 of the problem `of`; y is that of all tokens. 0, or -1 if memory ran out. */
typedef int (*reading)(const void *of, moert_pool *pool, int first, int stop, float *state, float *y);

typedef struct {
    const void *of;
    reading read;
    int tokens, width, size; /* numbers of y for each token, and of the state */
    const float *state;      /* before the first token */
} mixer;

static void run_pieces(const mixer *m, const engine *on, int most, float *state, float *y) {
    memcpy(state, m->state, (size_t)m->size * sizeof *state);
    fill(y, m->tokens * m->width);
    for (int t = 0, stop; t < m->tokens; t = stop) {
        int n = most < m->tokens ? 1 + draw(most) : m->tokens;
        stop = t + n < m->tokens ? t + n : m->tokens;
        require(on, !m->read(m->of, on->pool, t, stop, state, y), "no memory");
    }
}

static void run_mixer(const mixer *m, const estimate *expected, const estimate *left) {
    int length = m->tokens * m->width;
    float *y = claim((size_t)length * sizeof *y), *first_y = claim((size_t)length * sizeof *y);
    float *state = claim((size_t)m->size * sizeof *state), *first_state = claim((size_t)m->size * sizeof *state);
    for (int e = 0; e < engine_count; e++) {
        run_pieces(m, &engines[e], m->tokens, state, y);
        check(&engines[e], "output", y, expected, length);
        check(&engines[e], "state", state, left, m->size);
        agree(&engines[e], "output", y, first_y, length, EVERYWHERE);
        agree(&engines[e], "state", state, first_state, m->size, EVERYWHERE);
        if (m->tokens == 1) continue;
        run_pieces(m, &engines[e], e % 2 ? 1 : m->tokens / 2 + 1, state, y);
        again(&engines[e], "output in pieces", y, first_y, length);
        again(&engines[e], "state after pieces", state, first_state, m->size);
    }
    free(y), free(first_y), free(state), free(first_state);
}

/* Convolutions */

typedef struct {
    moert_taps with;
    const float *x;
} convolution;

static int read_convolution(const void *of, moert_pool *pool, int first, int stop, float *state, float *y) {
    const convolution *c = of;
    int at = first * c->with.channels;
    moert_convolve(pool, &c->with, stop - first, c->x + at, state, y + at);
    return 0;
}

static double input_of(const convolution *c, const float *state, int channel, int at) {
    int before = c->with.k - 1, channels = c->with.channels;
    return at < before ? state[at * channels + channel] : c->x[(at - before) * channels + channel];
}

static void one_convolution(int number) {
    int channels = PICK(1, 3, 7, 15, 16, 17, 40, 100, 511, 513, 1030), k = PICK(1, 2, 3, 4, 4, 9);
    int size = (k - 1) * channels, tokens = PICK(1, 1, 2, 3, 5, 17);
    float *taps = draw_floats(k * channels), *bias = draw(2) ? draw_floats(channels) : NULL;
    float *x = draw_floats(tokens * channels), *state = draw_floats(size);
    convolution c = {{taps, bias, channels, k, number % 2}, x};
    estimate y = estimate_make(tokens * channels), left = estimate_make(size);
    describe("conv: %d channels, %d taps, bias %d, silu %d, %d tokens", channels, k, bias != NULL, c.with.silu, tokens);
    for (int t = 0; t < tokens; t++)
        for (int i = 0; i < channels; i++) {
            double sum = bias ? bias[i] : 0, terms = fabs(sum);
            for (int j = 0; j < k; j++) {
                double term = taps[j * channels + i] * input_of(&c, state, i, t + j);
                sum += term, terms += fabs(term);
            }
            y.value[t * channels + i] = c.with.silu ? sum / (1 + exp(-sum)) : sum;
            y.error[t * channels + i] = INNER * terms;
        }
    for (int i = 0; i < size; i++) {
        left.value[i] = input_of(&c, state, i % channels, i / channels + tokens);
        left.error[i] = 0;
    }
    run_mixer(&(mixer){&c, read_convolution, tokens, channels, size, state}, &y, &left);
    estimate_free(&y), estimate_free(&left);
    free(taps), free(bias), free(x), free(state);
}

/* The delta rule */

static int read_delta(const void *of, moert_pool *pool, int first, int stop, float *state, float *y) {
    moert_delta part = *(const moert_delta *)of;
    int keys = first * part.key_heads * part.dk, values = first * part.heads * part.dv, heads = first * part.heads;
    part.q += keys, part.k += keys, part.v += values, part.decay += heads * part.each, part.beta += heads;
    part.tokens = stop - first, part.state = state, part.y = y + values;
    return moert_delta_rule(pool, &part);
}

/* of length 1, times `factor` */
static void direction(const float *x, int n, double factor, double *made) {
    double squares = 1e-6;
    for (int i = 0; i < n; i++) squares += (double)x[i] * x[i];
    for (int i = 0; i < n; i++) made[i] = x[i] / sqrt(squares) * factor;
}

/* One token of a column of a head. `s`: the column's numbers; `size`: sums of magnitudes instead of these. */
static void plain_column(const moert_delta *d, int at, double v, const double *k, const double *q, double *s, double *size,
                         double *y, double *terms) {
    double read = 0, reads = 0;
    for (int i = 0; i < d->dk; i++) {
        double keep = exp(d->decay[at * d->each + (d->each > 1 ? i : 0)]);
        s[i] *= keep, size[i] *= keep;
        read += k[i] * s[i], reads += fabs(k[i]) * size[i];
    }
    double put = d->beta[at] * (v - read), puts = fabs(d->beta[at]) * (fabs(v) + reads);
    *y = *terms = 0;
    for (int i = 0; i < d->dk; i++) {
        s[i] += k[i] * put, size[i] += fabs(k[i]) * puts;
        *y += q[i] * s[i], *terms += fabs(q[i]) * size[i];
    }
}

static void plain_delta(const moert_delta *d, estimate *y, estimate *left) {
    int dk = d->dk, dv = d->dv;
    double *k = claim((size_t)dk * sizeof *k), *q = claim((size_t)dk * sizeof *q);
    double *s = claim((size_t)dk * sizeof *s), *size = claim((size_t)dk * sizeof *size);
    for (int column = 0; column < d->heads * dv; column++) {
        int head = column / dv, place = head * dk * dv + column % dv, key_head = head / (d->heads / d->key_heads);
        for (int i = 0; i < dk; i++) s[i] = d->state[place + i * dv], size[i] = fabs(s[i]);
        for (int t = 0; t < d->tokens; t++) {
            int keys = (t * d->key_heads + key_head) * dk, to = t * d->heads * dv + column;
            direction(d->k + keys, dk, 1, k), direction(d->q + keys, dk, 1 / sqrt(dk), q);
            plain_column(d, t * d->heads + head, d->v[to], k, q, s, size, &y->value[to], &y->error[to]);
            y->error[to] *= FINAL;
        }
        for (int i = 0; i < dk; i++) left->value[place + i * dv] = s[i], left->error[place + i * dv] = FINAL * size[i];
    }
    free(k), free(q), free(s), free(size);
}

static void one_delta(int number) {
    moert_delta d = {.tokens = number % 9 ? PICK(1, 1, 2, 3, 5, 9) : 66, .key_heads = PICK(1, 2, 3)};
    d.heads = d.key_heads * PICK(1, 1, 2, 3);
    d.dk = PICK(1, 3, 8, 15, 16, 20, 33, 64), d.dv = number % 9 ? PICK(1, 5, 16, 17, 33, 64, 127, 129, 150, 260) : 20;
    int keys = d.tokens * d.key_heads * d.dk, heads = d.tokens * d.heads, size = d.heads * d.dk * d.dv;
    float *q = draw_floats(keys), *k = draw_floats(keys), *v = draw_floats(heads * d.dv), *state = draw_floats(size);
    d.each = draw(2) ? d.dk : 1;
    float *decay = draw_floats(heads * d.each), *beta = draw_floats(heads);
    for (int i = 0; i < heads * d.each; i++) decay[i] = -fabsf(decay[i]) * (float)PICK(0, 1, 1, 3, 100) - (d.tokens > 9);
    for (int i = 0; i < heads; i++) beta[i] = fabsf(beta[i]) / 2;
    if (draw(4) == 0) memset(k, 0, (size_t)d.dk * sizeof *k), memset(q, 0, (size_t)d.dk * sizeof *q);
    d.q = q, d.k = k, d.v = v, d.decay = decay, d.beta = beta, d.state = state;
    estimate y = estimate_make(heads * d.dv), left = estimate_make(size);
    describe("delta: %d tokens, %d heads for %d of %d by %d, each %d", d.tokens, d.heads, d.key_heads, d.dk, d.dv, d.each);
    plain_delta(&d, &y, &left);
    run_mixer(&(mixer){&d, read_delta, d.tokens, d.heads * d.dv, size, state}, &y, &left);
    estimate_free(&y), estimate_free(&left);
    free(q), free(k), free(v), free(decay), free(beta), free(state);
}

/* Scans */

static int read_scan(const void *of, moert_pool *pool, int first, int stop, float *state, float *y) {
    moert_scan part = *(const moert_scan *)of;
    int heads = first * part.heads, groups = first * part.groups * part.n;
    part.x += heads * part.p, part.dt += heads, part.b += groups, part.c += groups;
    part.tokens = stop - first, part.state = state, part.y = y + heads * part.p;
    return moert_scan_tokens(pool, &part);
}

static void plain_scan(const moert_scan *s, estimate *y, estimate *left) {
    for (int i = 0; i < s->heads * s->p * s->n; i++) left->value[i] = s->state[i], left->error[i] = fabs(s->state[i]);
    for (int t = 0; t < s->tokens; t++)
        for (int row = 0; row < s->heads * s->p; row++) {
            int head = row / s->p, group = (t * s->groups + head / (s->heads / s->groups)) * s->n;
            double dt = s->dt[t * s->heads + head], x = s->x[t * s->heads * s->p + row];
            double sum = s->d[head] * x, terms = fabs(sum);
            for (int i = 0; i < s->n; i++) {
                double keep = exp(dt * s->a[head * s->each + (s->each > 1 ? i : 0)]), put = dt * x * s->b[group + i];
                double *value = &left->value[row * s->n + i], *size = &left->error[row * s->n + i];
                *value = keep * *value + put, *size = keep * *size + fabs(put);
                sum += *value * s->c[group + i], terms += *size * fabs(s->c[group + i]);
            }
            y->value[t * s->heads * s->p + row] = sum, y->error[t * s->heads * s->p + row] = FINAL * terms;
        }
    for (int i = 0; i < s->heads * s->p * s->n; i++) left->error[i] *= FINAL;
}

static void one_scan(int number) {
    moert_scan s = {.tokens = PICK(1, 1, 2, 3, 5, 17), .groups = PICK(1, 1, 2, 3)};
    s.n = PICK(1, 5, 15, 16, 17, 32, 50, 64, 128);
    s.p = number % 3 ? PICK(1, 2, 5, 8, 64) : 1, s.each = draw(2) ? s.n : 1;
    s.heads = s.groups * (s.p == 1 ? PICK(1, 3, 64, 300) : PICK(1, 2, 3));
    int heads = s.tokens * s.heads, groups = s.tokens * s.groups * s.n, size = s.heads * s.p * s.n;
    float *x = draw_floats(heads * s.p), *dt = draw_floats(heads), *a = draw_floats(s.heads * s.each);
    float *b = draw_floats(groups), *c = draw_floats(groups), *d = draw_floats(s.heads), *state = draw_floats(size);
    for (int i = 0; i < heads; i++) dt[i] = fabsf(dt[i]);
    for (int i = 0; i < s.heads * s.each; i++) a[i] = -fabsf(a[i]) * (float)PICK(0, 1, 1, 4, 100);
    s.x = x, s.dt = dt, s.a = a, s.b = b, s.c = c, s.d = d, s.state = state;
    estimate y = estimate_make(heads * s.p), left = estimate_make(size);
    describe("scan: %d tokens, %d heads of %d by %d in %d groups, each %d", s.tokens, s.heads, s.p, s.n, s.groups, s.each);
    plain_scan(&s, &y, &left);
    run_mixer(&(mixer){&s, read_scan, s.tokens, s.heads * s.p, size, state}, &y, &left);
    estimate_free(&y), estimate_free(&left);
    free(x), free(dt), free(a), free(b), free(c), free(d), free(state);
}

void conv_cases(void) {
    for (int number = 0; number < 60; number++) {
        seed(10000 + (uint64_t)number);
        one_convolution(number);
    }
}

void delta_cases(void) {
    for (int number = 0; number < 90; number += apart) {
        seed(10100 + (uint64_t)number);
        one_delta(number);
    }
}

void scan_cases(void) {
    for (int number = 0; number < 90; number += apart) {
        seed(10200 + (uint64_t)number);
        one_scan(number);
    }
}
