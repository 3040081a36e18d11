/* What tokens pass beside attention and experts: norms, and the head at the end. */
#include <math.h>
#include <stdlib.h>

#include "products.h"

typedef struct {
    const operations *isa;
    const moert_norm *norm;
    const float *x;
    float *y;
    float factor;
    int n;
} norm_job;

static void norm_item(const void *job, int token, void *own) {
    const norm_job *j = job;
    (void)own;
    const int64_t at = (int64_t)token * j->n;
    if (!j->norm->weight) {
        for (int i = 0; i < j->n; i++) j->y[at + i] = j->x[at + i] * j->factor;
        return;
    }
    j->isa->norm(j->x + at, j->norm, j->factor, j->n, j->y + at);
}

static void norms(moert_pool *pool, const moert_norm *norm, float factor, int tokens, int n, const float *x, float *y) {
    const norm_job job = {pool_operations(pool), norm, x, y, factor, n};
    run_items(pool, norm_item, &job, tokens, 8LL * tokens * n);
}

void moert_normalise(moert_pool *pool, const moert_norm *norm, int tokens, int n, const float *x, float *y) {
    norms(pool, norm, 1, tokens, n, x, y);
}

#define BOUNDED 4096 /* numbers that make an item */

typedef struct {
    float *y, softcap;
    int64_t n;
} bound_job;

static void bound_item(const void *job, int item, void *own) {
    const bound_job *j = job;
    (void)own;
    for (int64_t i = (int64_t)item * BOUNDED, stop = i + piece(j->n, BOUNDED, item); i < stop; i++)
        j->y[i] = j->softcap * tanhf(j->y[i] / j->softcap);
}

int moert_head(moert_pool *pool, const moert_norm *norm, float factor, float softcap, const moert_matrix *matrix,
               int tokens, const float *x, float *y) {
    float *hidden = malloc((size_t)tokens * (size_t)matrix->cols * sizeof *hidden);
    if (!hidden) return -1;
    norms(pool, norm, factor, tokens, matrix->cols, x, hidden);
    const int failed = moert_linear(pool, 1, &matrix, hidden, tokens, &y);
    free(hidden);
    const bound_job bound = {y, softcap, softcap > 0 && !failed ? (int64_t)tokens * matrix->rows : 0};
    run_items(pool, bound_item, &bound, pieces(bound.n, BOUNDED), 32 * bound.n);
    return failed;
}
