/* What tokens pass beside attention and experts: norms, the router before the experts, the head at the end. */
#include <math.h>
#include <stdlib.h>

#include "products.h"

typedef struct {
    const operations *isa;
    const float *weight, *x;
    float *y;
    float eps, factor;
    int n;
} norm_job;

static void norm_item(const void *job, int token, void *own) {
    const norm_job *j = job;
    (void)own;
    const int64_t at = (int64_t)token * j->n;
    j->isa->norm(j->x + at, j->weight, j->eps, j->factor, j->n, j->y + at);
}

static void norms(moert_pool *pool, const float *weight, float eps, float factor, int tokens, int n, const float *x,
                  float *y) {
    const norm_job job = {pool_operations(pool), weight, x, y, eps, factor, n};
    run_items(pool, norm_item, &job, tokens, 8LL * tokens * n);
}

void moert_norm(moert_pool *pool, const float *weight, float eps, int tokens, int n, const float *x, float *y) {
    norms(pool, weight, eps, 1, tokens, n, x, y);
}

/* Probabilities in place of scores [n]. */
static void softmax(float *scores, int n) {
    float most = scores[0], sum = 0;
    for (int i = 1; i < n; i++) most = scores[i] > most ? scores[i] : most;
    for (int i = 0; i < n; i++) sum += scores[i] = expf(scores[i] - most);
    for (int i = 0; i < n; i++) scores[i] /= sum;
}

int moert_scores(moert_pool *pool, const float *norm, float eps, const moert_matrix *router, int tokens, const float *x,
                 float *hidden, float *probabilities) {
    norms(pool, norm, eps, 1, tokens, router->cols, x, hidden);
    if (moert_linear(pool, 1, &router, hidden, tokens, &probabilities)) return -1;
    for (int token = 0; token < tokens; token++) softmax(probabilities + (int64_t)token * router->rows, router->rows);
    return 0;
}

/* The k largest of n, the first of equal ones; ascending by number. A probability that was taken becomes -1. */
static void largest(float *probabilities, int n, int k, int64_t *chosen, float *weights) {
    for (int found = 0; found < k; found++) {
        int best = -1, place = found;
        for (int i = 0; i < n; i++)
            if (probabilities[i] != -1 && (best < 0 || probabilities[i] > probabilities[best])) best = i;
        for (; place > 0 && chosen[place - 1] > best; place--) {
            chosen[place] = chosen[place - 1];
            weights[place] = weights[place - 1];
        }
        chosen[place] = best;
        weights[place] = probabilities[best];
        probabilities[best] = -1;
    }
}

void moert_choose(float *probabilities, int tokens, int experts, int top_k, int renormalise, int64_t *chosen,
                  float *weights) {
    for (int token = 0; token < tokens; token++, chosen += top_k, weights += top_k) {
        float sum = 0;
        largest(probabilities + (int64_t)token * experts, experts, top_k, chosen, weights);
        for (int i = 0; i < top_k; i++) sum += weights[i];
        for (int i = 0; i < top_k && renormalise; i++) weights[i] /= sum;
    }
}

int moert_head(moert_pool *pool, const float *norm, float eps, float factor, const moert_matrix *matrix, int tokens,
               const float *x, float *y) {
    float *hidden = malloc((size_t)tokens * (size_t)matrix->cols * sizeof *hidden);
    if (!hidden) return -1;
    norms(pool, norm, eps, factor, tokens, matrix->cols, x, hidden);
    const int failed = moert_linear(pool, 1, &matrix, hidden, tokens, &y);
    free(hidden);
    return failed;
}
