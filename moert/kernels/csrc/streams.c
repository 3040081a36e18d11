/* The matrices that mix several streams of a token. */
#include "products.h"

typedef struct {
    float *matrices, floor;
    int n, rounds;
} balance_job;

static void by_rows(const balance_job *j, float *matrix) {
    for (int row = 0; row < j->n; row++, matrix += j->n) {
        float sum = matrix[0];
        for (int i = 1; i < j->n; i++) sum += matrix[i];
        sum += j->floor;
        for (int i = 0; i < j->n; i++) matrix[i] /= sum;
    }
}

static void by_columns(const balance_job *j, float *matrix) {
    float sums[MOERT_MOST_STREAMS];
    for (int i = 0; i < j->n; i++) sums[i] = matrix[i];
    for (int row = 1; row < j->n; row++)
        for (int i = 0; i < j->n; i++) sums[i] += matrix[row * j->n + i];
    for (int i = 0; i < j->n; i++) sums[i] += j->floor;
    for (int row = 0; row < j->n; row++)
        for (int i = 0; i < j->n; i++) matrix[row * j->n + i] /= sums[i];
}

static void balance_item(const void *job, int token, void *own) {
    const balance_job *j = job;
    float *matrix = j->matrices + (int64_t)token * j->n * j->n;
    (void)own;
    for (int round = 0; round < j->rounds; round++) {
        if (round) by_rows(j, matrix);
        by_columns(j, matrix);
    }
}

void moert_balance(moert_pool *pool, int tokens, int n, int rounds, float floor, float *matrices) {
    const balance_job job = {matrices, floor, n, rounds};
    run_items(pool, balance_item, &job, tokens, 8LL * tokens * n * n * rounds);
}
