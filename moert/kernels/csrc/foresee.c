/* A small network that foresees which experts a model's layers will choose, cut into items for the pool. */
#include <string.h>

#include "products.h"

#define SEQUENCES 16       /* of an LSTM that make an item */
#define NUMBERS (16 << 10) /* of keys: about as many make an item */

typedef struct {
    const operations *isa;
    const moert_lstm *lstm;
    const lstm_row *rows;
    int count, parts; /* items of some units */
} lstm_job;

static void lstm_item(const void *job, int item, void *own) {
    const lstm_job *j = job;
    const int width = j->lstm->width, first = item / j->parts * LSTM_UNITS, at = item % j->parts;
    const int units = piece(width, LSTM_UNITS, item / j->parts);
    (void)own;
    j->isa->lstm(j->lstm->recurrent, width, first, first + units, piece(j->count, SEQUENCES, at), j->rows + at * SEQUENCES);
}

/* Rows that step `step` reads, of the sequences that are as long: how many. */
static int step_rows(const moert_lstm *l, int step, lstm_row *rows) {
    const int64_t width = l->width, before = l->backward ? width : -width;
    int64_t start = 0;
    int count = 0;
    for (int s = 0; s < l->sequences; start += l->counts[s++]) {
        if (l->counts[s] <= step) continue;
        const int64_t at = start + (l->backward ? l->counts[s] - 1 - step : step);
        float *state = l->state + 2 * s * width, *y = l->y + at * width;
        rows[count++] = (lstm_row){l->inputs + 4 * at * width, step ? y + before : state, state + width, y};
    }
    return count;
}

int moert_lstm_tokens(moert_pool *pool, const moert_lstm *lstm) {
    const size_t bytes = (size_t)lstm->width * sizeof(float);
    const int blocks = pieces(lstm->width, LSTM_UNITS);
    if (!lstm->sequences) return 0;
    lstm_row *rows = pool_lists(pool, (size_t)lstm->sequences * sizeof *rows);
    lstm_job job = {pool_operations(pool), lstm, rows, 0, 0};
    if (!rows) return -1;
    for (int step = 0; !pool_stopped(pool) && (job.count = step_rows(lstm, step, rows)); step++) {
        job.parts = pieces(job.count, SEQUENCES);
        run_items(pool, lstm_item, &job, blocks * job.parts, 16LL * lstm->width * lstm->width * job.count);
    }
    const float *next = lstm->y;
    for (int s = 0; s < lstm->sequences; s++) {
        const int64_t n = lstm->counts[s], last = lstm->backward ? 0 : n - 1;
        if (n) memcpy(lstm->state + 2LL * s * lstm->width, next + last * lstm->width, bytes);
        next += n * lstm->width;
    }
    return 0;
}

typedef struct {
    const operations *isa;
    const moert_sparse *sparse;
    int each; /* rows of an item */
} sparse_job;

static void sparse_item(const void *job, int item, void *own) {
    const sparse_job *j = job;
    const int first = item * j->each;
    for (int row = first; row < first + piece(j->sparse->rows, j->each, item); row++)
        j->isa->attend_sparsely(j->sparse, row, own);
}

int moert_attend_sparsely(moert_pool *pool, const moert_sparse *sparse) {
    int64_t longest = 1, all = 0;
    for (int row = 0; row < sparse->rows; row++) {
        const int64_t n = (int64_t)sparse->spans[2 * row + 1] - sparse->spans[2 * row];
        longest = n > longest ? n : longest;
        all += n > 0 ? n : 0;
    }
    const int64_t rows = NUMBERS / (longest * sparse->width);
    const sparse_job job = {pool_operations(pool), sparse, rows > 1 ? (int)rows : 1};
    if (pool_own(pool, (size_t)longest * sizeof(float))) return -1;
    run_items(pool, sparse_item, &job, pieces(sparse->rows, job.each), 8 * all * sparse->width);
    return 0;
}
