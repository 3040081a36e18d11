/* Attention as moert.h says it, in double precision, with bounds of the error as in reference.c. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attend.h"

void attend_finish(const moert_attention *block, const float *norm, int heads, estimate *x) {
    int all = heads * block->head_dim, width = block->norm_each ? block->head_dim : all;
    for (int at = 0; norm && at < all; at += width) {
        estimate part = estimate_at(x, at);
        plain_norm(&part, norm, block->eps, 1, width, &part);
    }
    for (int i = 0; i < all; i++) x->value[i] = fmax(fmin(x->value[i], block->clip), -(double)block->clip);
}

static void turn_heads(const attend *a, int token, int heads, estimate *x) {
    int dim = a->block.head_dim, half = a->block.rope_dims / 2;
    const float *cosines = a->turns + token * 2 * half, *sines = cosines + half;
    for (int at = 0; at < heads * dim; at += dim)
        for (int i = 0; i < half; i++) {
            double *low = &x->value[at + i], *high = low + half, was_low = *low, was_high = *high;
            double *low_error = &x->error[at + i], *high_error = low_error + half;
            *low = was_low * cosines[i] - was_high * sines[i];
            *high = was_high * cosines[i] + was_low * sines[i];
            *low_error = *high_error = *low_error + *high_error + INNER * (fabs(was_low) + fabs(was_high));
        }
}

/* Those of one token among those of all positions. */
static void keep_token(const attend *a, int token, const estimate *from, estimate *all) {
    int dim = a->block.head_dim;
    for (int head = 0; head < a->block.kv_heads; head++) {
        estimate each = estimate_at(from, head * dim), to = estimate_at(all, (head * a->length + a->start + token) * dim);
        kept_rounded(&a->before, &each, &to);
    }
}

attend_input attend_project(const attend *a) {
    const moert_attention *b = &a->block;
    int inner = b->heads * b->head_dim, narrow = b->kv_heads * b->head_dim;
    attend_input in = {.queries = estimate_make(a->tokens * inner)};
    estimate hidden = estimate_make(a->d_model), fresh = estimate_make(narrow);
    in.keys = estimate_make(narrow * a->length), in.values = estimate_make(narrow * a->length);
    kept_numbers(&a->before, &in.keys, &in.values);
    for (int t = 0; t < a->tokens; t++) {
        estimate x = estimate_of(a->x + t * a->d_model, a->d_model), query = estimate_at(&in.queries, t * inner);
        plain_norm(&x, a->norm, b->eps, 1, a->d_model, &hidden);
        plain_multiply(&a->q, &hidden, INNER, &query);
        attend_finish(b, a->q_norm, b->heads, &query);
        if (a->turns) turn_heads(a, t, b->heads, &query);
        if (a->own) {
            plain_multiply(&a->k, &hidden, INNER, &fresh);
            attend_finish(b, a->k_norm, b->kv_heads, &fresh);
            if (a->turns) turn_heads(a, t, b->kv_heads, &fresh);
            keep_token(a, t, &fresh, &in.keys);
            plain_multiply(&a->v, &hidden, INNER, &fresh);
            attend_finish(b, NULL, b->kv_heads, &fresh);
            keep_token(a, t, &fresh, &in.values);
        }
        estimate_free(&x);
    }
    estimate_free(&hidden), estimate_free(&fresh);
    return in;
}

void attend_input_free(attend_input *in) {
    estimate_free(&in->queries), estimate_free(&in->keys), estimate_free(&in->values);
}

/* A query of one head, and the keys and values of that head. */
typedef struct {
    estimate query, keys, values;
    int head, at, first, stop;
} view;

static view view_of(const attend *a, const attend_input *in, int token, int head) {
    const moert_attention *b = &a->block;
    int place = head / (b->heads / b->kv_heads) * a->length * b->head_dim, at = a->start + token;
    int stop = b->causal ? at + 1 : a->length, first = b->window && stop > b->window ? stop - b->window : 0;
    return (view){estimate_at(&in->queries, (token * b->heads + head) * b->head_dim), estimate_at(&in->keys, place),
                  estimate_at(&in->values, place), head, at, first, stop};
}

/* query · key; its error is added to *error. */
static double product(const view *v, int dim, int position, double *error) {
    double sum = 0;
    for (int i = 0; i < dim; i++) {
        double q = v->query.value[i], k = v->keys.value[position * dim + i], k_error = v->keys.error[position * dim + i];
        sum += q * k;
        *error += (fabs(q) + v->query.error[i]) * k_error + fabs(k) * v->query.error[i] + INNER * fabs(q * k);
    }
    return sum;
}

double attend_reach(const attend *a, const attend_input *in) {
    double reach = 0, error = 0;
    for (int head = 0; head < a->block.heads; head++) {
        view v = view_of(a, in, a->tokens - 1, head);
        for (int k = v.first; k < v.stop; k++) reach = fmax(reach, fabs(product(&v, a->block.head_dim, k, &error)));
    }
    return reach;
}

/* The share of each key that is seen; gives how wrong they may be, as a share of each. */
static double weigh(const attend *a, const view *v, double *shares) {
    const moert_attention *b = &a->block;
    double most = b->sinks ? a->sinks[v->head] : -INFINITY, total = 0, doubt = 0;
    for (int k = v->first; k < v->stop; k++) {
        double error = 0, score = product(v, b->head_dim, k, &error) * b->scale;
        if (b->softcap > 0) score = b->softcap * tanh(score / b->softcap);
        if (a->bias) score += a->bias[v->head * a->bias_stride + a->bias_middle + k - v->at];
        doubt = fmax(doubt, error * fabs(b->scale) + 1e-6 * (fabs(score) + b->softcap));
        most = fmax(most, shares[k] = score);
    }
    for (int k = v->first; k < v->stop; k++) total += shares[k] = exp(shares[k] - most);
    if (b->sinks) total += exp(a->sinks[v->head] - most);
    for (int k = v->first; k < v->stop; k++) shares[k] /= total;
    return expm1(2 * doubt) + INNER;
}

static void one_head(const attend *a, const view *v, double *shares, estimate *mixed) {
    int dim = a->block.head_dim;
    double wrong = weigh(a, v, shares);
    for (int i = 0; i < dim; i++) mixed->value[i] = mixed->error[i] = 0;
    for (int k = v->first; k < v->stop; k++)
        for (int i = 0; i < dim; i++) {
            double value = v->values.value[k * dim + i], error = v->values.error[k * dim + i];
            mixed->value[i] += shares[k] * value;
            mixed->error[i] += shares[k] * (error + wrong * (fabs(value) + error)) + 1e-37; /* float32 ends there */
        }
}

void attend_answer(const attend *a, const attend_input *in, estimate *out) {
    int dim = a->block.head_dim;
    estimate joined = estimate_make(a->block.heads * dim);
    double *shares = claim((size_t)a->length * sizeof *shares);
    for (int t = 0; t < a->tokens; t++) {
        estimate y = estimate_at(out, t * a->d_model);
        for (int head = 0; head < a->block.heads; head++) {
            view v = view_of(a, in, t, head);
            estimate mixed = estimate_at(&joined, head * dim);
            one_head(a, &v, shares, &mixed);
        }
        plain_multiply(&a->o, &joined, FINAL, &y);
        for (int i = 0; i < a->d_model; i++) {
            y.value[i] += a->x[t * a->d_model + i];
            y.error[i] += INNER * fabs(y.value[i]);
        }
    }
    estimate_free(&joined);
    free(shares);
}
