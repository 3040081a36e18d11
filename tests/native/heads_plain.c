/* What heads read, as moert.h says it, in double precision, with bounds of the error as in reference.c. */
#include <math.h>
#include <stdlib.h>

#include "attend.h"

reading reading_make(const sequence *s) {
    const moert_heads *h = sequence_heads(s);
    reading made = {.heads = h, .queries = estimate_make(s->tokens * h->n * h->dim)};
    made.keys = estimate_make(h->kv * s->length * h->dim), made.values = estimate_make(h->kv * s->length * h->value_dim);
    kept_numbers(&s->before, &made.keys, &made.values);
    return made;
}

void reading_free(reading *r) { estimate_free(&r->queries), estimate_free(&r->keys), estimate_free(&r->values); }

void plain_turn(const sequence *s, int token, int heads, int dim, estimate *x) {
    int half = s->rope_dims / 2;
    const float *cosines = s->turns + token * 2 * half, *sines = cosines + half;
    for (int at = 0; at < heads * dim; at += dim)
        for (int i = 0; i < half; i++) {
            double *low = &x->value[at + i], *high = low + half, was_low = *low, was_high = *high;
            double *low_error = &x->error[at + i], *high_error = low_error + half;
            *low = was_low * cosines[i] - was_high * sines[i];
            *high = was_high * cosines[i] + was_low * sines[i];
            *low_error = *high_error = *low_error + *high_error + INNER * (fabs(was_low) + fabs(was_high));
        }
}

void plain_query_scale(const sequence *s, int token, int length, estimate *x) {
    double by = s->query_scale ? s->query_scale[token] : 1;
    for (int i = 0; i < length; i++) {
        x->value[i] *= by;
        x->error[i] = x->error[i] * fabs(by) + 1e-7 * fabs(x->value[i]);
    }
}

int plain_first(const moert_heads *heads, int at, int stop) {
    int first = 0;
    while (heads->window && stop - first > heads->window) first++;
    while (heads->chunk && first / heads->chunk < at / heads->chunk) first++;
    return first;
}

/* A query of one head, and the keys and values of that head. */
typedef struct {
    estimate query, keys, values;
    int head, at, first, stop;
} view;

static view view_of(const sequence *s, const reading *r, int token, int head) {
    const moert_heads *h = r->heads;
    int place = head / (h->n / h->kv) * s->length, at = s->start + token, stop = h->causal ? at + 1 : s->length;
    return (view){estimate_at(&r->queries, (token * h->n + head) * h->dim), estimate_at(&r->keys, place * h->dim),
                  estimate_at(&r->values, place * h->value_dim), head, at, plain_first(h, at, stop), stop};
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

double reading_reach(const sequence *s, const reading *r) {
    double reach = 0, error = 0;
    for (int head = 0; head < r->heads->n; head++) {
        view v = view_of(s, r, s->tokens - 1, head);
        for (int k = v.first; k < v.stop; k++) reach = fmax(reach, fabs(product(&v, r->heads->dim, k, &error)));
    }
    return reach;
}

/* The share of each key that is seen; gives how wrong they may be, as a share of each. */
static double weigh(const sequence *s, const moert_heads *h, const view *v, double *shares) {
    double most = h->sinks ? h->sinks[v->head] : -INFINITY, total = 0, doubt = 0;
    for (int k = v->first; k < v->stop; k++) {
        double error = 0, score = product(v, h->dim, k, &error) * h->scale;
        if (h->softcap > 0) score = h->softcap * tanh(score / h->softcap);
        if (s->bias) score += s->bias[v->head * s->bias_stride + s->bias_middle + k - v->at];
        doubt = fmax(doubt, error * fabs(h->scale) + 1e-6 * (fabs(score) + h->softcap));
        most = fmax(most, shares[k] = score);
    }
    for (int k = v->first; k < v->stop; k++) total += shares[k] = exp(shares[k] - most);
    if (h->sinks) total += exp(h->sinks[v->head] - most);
    for (int k = v->first; k < v->stop; k++) shares[k] /= total;
    return expm1(2 * doubt) + INNER;
}

static void one_head(const sequence *s, const moert_heads *h, const view *v, double *shares, estimate *mixed) {
    int dim = h->value_dim;
    double wrong = weigh(s, h, v, shares);
    for (int i = 0; i < dim; i++) mixed->value[i] = mixed->error[i] = 0;
    for (int k = v->first; k < v->stop; k++) {
        double off = fmin(shares[k] * wrong, 1); /* also where that is no number */
        for (int i = 0; i < dim; i++) {
            double value = v->values.value[k * dim + i], error = v->values.error[k * dim + i];
            mixed->value[i] += shares[k] * value;
            mixed->error[i] += shares[k] * error + off * (fabs(value) + error) + 1e-37; /* float32 ends there */
        }
    }
}

void plain_heads(const sequence *s, const reading *r, int token, estimate *mixed) {
    double *shares = claim((size_t)s->length * sizeof *shares);
    for (int head = 0; head < r->heads->n; head++) {
        view v = view_of(s, r, token, head);
        estimate of_head = estimate_at(mixed, head * r->heads->value_dim);
        one_head(s, r->heads, &v, shares, &of_head);
    }
    free(shares);
}

void plain_join(const sequence *s, int token, const moert_norm *after, float add, estimate *made, estimate *out) {
    if (after->weight) plain_norm(made, after, 1, s->d_model, made);
    for (int i = 0; i < s->d_model; i++) {
        out->value[i] = s->x[token * s->d_model + i] + add * made->value[i];
        out->error[i] = fabs(add) * (made->error[i] + INNER * fabs(made->value[i])) + INNER * fabs(out->value[i]);
    }
}
