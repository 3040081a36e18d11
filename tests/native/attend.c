/* moert_attend: own and given keys, grouped heads, norms, limits, rotary positions, biases; moert_route. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"

static const int kinds[] = {MOERT_F32, MOERT_F16, MOERT_BF16, 8, 4, 3, 2};

typedef struct {
    int d_model, heads, kv_heads, head_dim, length, stride, bias_stride, given;
    problem_matrix q, k, v, o;
    float *norm, *q_norm, *k_norm, *turn, *bias, *x, *keys, *values;
    moert_attention attention;
} attend;

/* Norm over the whole vector, limit, rotary positions. */
static void finish(const attend *a, estimate *u, int heads, const float *norm, const float *turn) {
    int length = heads * a->head_dim, half = a->head_dim / 2;
    double clip = a->attention.clip;
    if (norm) plain_norm(u, norm, a->attention.eps, 1, length, u);
    for (int i = 0; i < length; i++) u->value[i] = fmax(fmin(u->value[i], clip), -clip);
    if (!turn) return;
    for (int at = 0; at < length; at += a->head_dim)
        for (int i = 0; i < half; i++) {
            double *p = &u->value[at + i], *r = &u->value[at + i + half], *ep = &u->error[at + i];
            double *er = &u->error[at + i + half], low = *p, high = *r, e = *ep + *er;
            *p = low * turn[i] + high * turn[a->head_dim + i];
            *r = high * turn[i + half] + low * turn[a->head_dim + i + half];
            *ep = e + INNER * (fabs(low) + fabs(high)), *er = *ep;
        }
}

static estimate row_of(const attend *a, const float *cache, const estimate *fresh, int head, int at) {
    estimate row = estimate_make(a->head_dim);
    for (int i = 0; i < a->head_dim; i++) {
        int is_fresh = fresh && at == a->length - 1;
        row.value[i] = is_fresh ? fresh->value[head * a->head_dim + i] : cache[head * a->stride + at * a->head_dim + i];
        row.error[i] = is_fresh ? fresh->error[head * a->head_dim + i] : 0;
    }
    return row;
}

static void one_head(const attend *a, int head, const estimate *q, const estimate *k, const estimate *v, estimate *out) {
    int dim = a->head_dim, from = head / (a->heads / a->kv_heads);
    const double *query = q->value + head * dim, *query_error = q->error + head * dim;
    double *score = claim((size_t)a->length * sizeof *score), largest = -INFINITY, doubt = 0, total = 0;
    for (int t = 0; t < a->length; t++) {
        estimate key = row_of(a, a->keys, k, from, t);
        double sum = 0, error = 0, bias = a->bias ? a->bias[head * a->bias_stride + t] : 0;
        for (int i = 0; i < dim; i++) {
            sum += query[i] * key.value[i];
            error += (fabs(query[i]) + query_error[i]) * key.error[i] + fabs(key.value[i]) * query_error[i] +
                     INNER * fabs(query[i] * key.value[i]);
        }
        score[t] = sum * a->attention.scale + bias;
        doubt = fmax(doubt, error * fabs(a->attention.scale) + 2e-7 * fabs(score[t]));
        largest = fmax(largest, score[t]);
        estimate_free(&key);
    }
    for (int t = 0; t < a->length; t++) total += score[t] = exp(score[t] - largest);
    for (int i = 0; i < dim; i++) out->value[head * dim + i] = out->error[head * dim + i] = 0;
    for (int t = 0; t < a->length; t++) {
        estimate value = row_of(a, a->values, v, from, t);
        double share = score[t] / total;
        for (int i = 0; i < dim; i++) {
            out->value[head * dim + i] += share * value.value[i];
            out->error[head * dim + i] +=
                share * (value.error[i] + (expm1(2 * doubt) + INNER) * (fabs(value.value[i]) + value.error[i]));
        }
        estimate_free(&value);
    }
    free(score);
}

static void expect(const attend *a, estimate *k, estimate *v, estimate *out) {
    int inner = a->heads * a->head_dim;
    estimate x = estimate_of(a->x, a->d_model), hidden = estimate_make(a->d_model);
    estimate q = estimate_make(inner), joined = estimate_make(inner);
    plain_norm(&x, a->norm, a->attention.eps, 1, a->d_model, &hidden);
    plain_multiply(&a->q, &hidden, INNER, &q);
    finish(a, &q, a->heads, a->q_norm, a->turn);
    if (!a->given) {
        plain_multiply(&a->k, &hidden, INNER, k);
        plain_multiply(&a->v, &hidden, INNER, v);
        finish(a, k, a->kv_heads, a->k_norm, a->turn);
        finish(a, v, a->kv_heads, NULL, NULL);
    }
    for (int head = 0; head < a->heads; head++)
        one_head(a, head, &q, a->given ? NULL : k, a->given ? NULL : v, &joined);
    plain_multiply(&a->o, &joined, FINAL, out);
    for (int i = 0; i < a->d_model; i++) {
        out->value[i] += x.value[i];
        out->error[i] += INNER * fabs(out->value[i]);
    }
    estimate_free(&x), estimate_free(&hidden), estimate_free(&q), estimate_free(&joined);
}

/* The new row is what it must be, and no other number has changed. */
static void check_cache(const attend *a, const engine *on, const char *name, const float *found, const float *before,
                        int length, estimate *fresh) {
    int last = (a->length - 1) * a->head_dim, changed = 0;
    for (int i = 0; i < length; i++) {
        int inside = !a->given && i % a->stride >= last && i % a->stride < last + a->head_dim;
        changed |= !inside && found[i] != before[i];
    }
    require(on, !changed, "a key or value was changed that must stay");
    for (int head = 0; head < a->kv_heads && !a->given; head++) {
        estimate row = {fresh->value + head * a->head_dim, fresh->error + head * a->head_dim};
        check(on, name, found + head * a->stride + last, &row, a->head_dim);
    }
}

static void run_attend(attend *a) {
    int cache = (a->kv_heads - 1) * a->stride + a->length * a->head_dim;
    size_t bytes = (size_t)cache * sizeof(float);
    estimate k = estimate_make(a->kv_heads * a->head_dim), v = estimate_make(a->kv_heads * a->head_dim);
    estimate out = estimate_make(a->d_model);
    float *x = claim((size_t)a->d_model * sizeof *x), *keys = claim(bytes), *values = claim(bytes);
    a->keys = draw_floats(cache), a->values = draw_floats(cache);
    expect(a, &k, &v, &out);
    for (int e = 0; e < engine_count; e++) {
        memcpy(x, a->x, (size_t)a->d_model * sizeof *x);
        memcpy(keys, a->keys, bytes), memcpy(values, a->values, bytes);
        int failed = moert_attend(engines[e].pool, &a->attention, x, keys, values, a->stride, a->length, a->turn, a->bias,
                                  a->bias_stride);
        require(&engines[e], !failed, "no memory");
        check_cache(a, &engines[e], "key", keys, a->keys, cache, &k);
        check_cache(a, &engines[e], "value", values, a->values, cache, &v);
        check(&engines[e], "output", x, &out, a->d_model);
    }
    estimate_free(&k), estimate_free(&v), estimate_free(&out);
    free(x), free(keys), free(values), free(a->keys), free(a->values);
}

static float *draw_turn(int head_dim, int position) {
    float *turn = claim((size_t)head_dim * 2 * sizeof *turn);
    for (int i = 0; i < head_dim; i++) {
        double angle = position * pow(10000, -2.0 * (i % (head_dim / 2)) / head_dim);
        turn[i] = (float)cos(angle);
        turn[head_dim + i] = (float)(i < head_dim / 2 ? -sin(angle) : sin(angle));
    }
    return turn;
}

static void one_attend(int number) {
    static const int lengths[] = {1, 2, 3, 16, 17, 33, 100};
    attend a = {.d_model = (int[]){8, 33, 64, 96}[draw(4)], .kv_heads = 1 + draw(3), .given = number % 5 == 4};
    int kind = kinds[number % 7], share = 1 + draw(3), rotary = draw(2) && !a.given;
    a.heads = a.kv_heads * share, a.head_dim = (int[]){2, 6, 8, 16, 20, 32}[draw(6)], a.length = lengths[draw(7)];
    a.stride = (a.length + draw(3)) * a.head_dim, a.bias_stride = a.length + draw(3);
    int inner = a.heads * a.head_dim, narrow = a.kv_heads * a.head_dim;
    a.q = matrix_make(kind, inner, a.d_model, 32, PLAIN), a.o = matrix_make(kind, a.d_model, inner, 0, PLAIN);
    if (!a.given) a.k = matrix_make(kind, narrow, a.d_model, 16, PLAIN), a.v = matrix_make(8, narrow, a.d_model, 0, PLAIN);
    a.norm = draw_floats(a.d_model), a.x = draw_floats(a.d_model);
    if (draw(2)) a.q_norm = draw_floats(inner), a.k_norm = draw_floats(narrow);
    if (rotary) a.turn = draw_turn(a.head_dim, a.length - 1);
    if (draw(2)) a.bias = draw_floats((a.heads - 1) * a.bias_stride + a.length);
    a.attention = (moert_attention){a.norm, a.q_norm, a.k_norm, a.q.matrix, a.k.matrix, a.v.matrix, a.o.matrix,
                                    a.heads, a.kv_heads, a.head_dim, 1e-5f, 0.25f, draw(3) ? INFINITY : 0.75f};
    describe("attend: kind %d, d_model %d, %d heads of %d for %d, length %d, norms %d, rotary %d, bias %d, given %d, clip %g",
             kind, a.d_model, a.heads, a.head_dim, a.kv_heads, a.length, a.q_norm != NULL, rotary, a.bias != NULL, a.given,
             a.attention.clip);
    run_attend(&a);
    matrix_free(&a.q), matrix_free(&a.o), matrix_free(&a.k), matrix_free(&a.v);
    free(a.norm), free(a.x), free(a.q_norm), free(a.k_norm), free(a.turn), free(a.bias);
}

void attend_cases(void) {
    for (int number = 0; number < 150; number++) {
        seed(6000 + (uint64_t)number);
        one_attend(number);
    }
}
