/* What one token passes beside attention and experts: the router before them, the head at the end. */
#include <math.h>
#include <stdlib.h>

#include "products.h"

/* y = matrix · (norm(x) * factor); hidden [d_model] takes the normed vector. */
static int normed_linear(moert_pool *pool, const float *norm, float eps, float factor, const moert_matrix *matrix,
                         const float *x, float *hidden, float *y) {
    pool_operations(pool)->norm(x, norm, eps, factor, matrix->cols, hidden);
    return moert_linear(pool, 1, &matrix, hidden, 1, &y);
}

/* Probabilities in place of scores [n]. */
static void softmax(float *scores, int n) {
    float most = scores[0], sum = 0;
    for (int i = 1; i < n; i++) most = scores[i] > most ? scores[i] : most;
    for (int i = 0; i < n; i++) sum += scores[i] = expf(scores[i] - most);
    for (int i = 0; i < n; i++) scores[i] /= sum;
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

int moert_route(moert_pool *pool, const float *norm, float eps, const moert_matrix *router, const float *x, int top_k,
                int renormalise, float *hidden, int64_t *experts, float *weights) {
    float few[512], *probabilities = few, sum = 0;
    if (router->rows > 512 && !(probabilities = malloc((size_t)router->rows * sizeof(float)))) return -1;
    const int failed = normed_linear(pool, norm, eps, 1, router, x, hidden, probabilities);
    if (!failed) {
        softmax(probabilities, router->rows);
        largest(probabilities, router->rows, top_k, experts, weights);
        for (int i = 0; i < top_k; i++) sum += weights[i];
        for (int i = 0; i < top_k && renormalise; i++) weights[i] /= sum;
    }
    if (probabilities != few) free(probabilities);
    return failed;
}

int moert_head(moert_pool *pool, const float *norm, float eps, float factor, const moert_matrix *matrix, const float *x,
               float *y) {
    float *hidden = malloc((size_t)matrix->cols * sizeof(float));
    if (!hidden) return -1;
    const int failed = normed_linear(pool, norm, eps, factor, matrix, x, hidden, y);
    free(hidden);
    return failed;
}
