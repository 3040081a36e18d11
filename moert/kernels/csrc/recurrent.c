/* Token mixers with a state of fixed size, cut into items for the pool; and what comes before and after them. */
#include <math.h>

#include "products.h"

#define CHANNELS 512       /* of a convolution that make an item */
#define NUMBERS (4 << 10)  /* about as many make an item elsewhere */
#define TOKENS_AT_ONCE 64  /* whose keys are held */
#define PRODUCTS (8 << 20) /* about as many are made between two looks at whether the pool is stopped */

/* Tokens that are read at once, of which each makes so many products. */
static int tokens_at_once(int64_t each) { return each < PRODUCTS ? (int)(PRODUCTS / (each ? each : 1)) : 1; }

static int rows_an_item(int n) { return n < NUMBERS ? NUMBERS / (n ? n : 1) : 1; }

typedef struct {
    const operations *isa;
    const moert_taps *with;
    const float *x;
    float *state, *y;
    int tokens;
} conv_job;

static void conv_item(const void *job, int item, void *own) {
    const conv_job *j = job;
    const int first = item * CHANNELS, stop = first + piece(j->with->channels, CHANNELS, item);
    (void)own;
    j->isa->convolve(j->with, first, stop, j->tokens, j->x, j->state, j->y);
}

void moert_convolve(moert_pool *pool, const moert_taps *with, int tokens, const float *x, float *state, float *y) {
    const int64_t channels = with->channels, each = channels * with->k;
    const int most = tokens_at_once(each);
    for (int first = 0; first < tokens; first += most) {
        const conv_job job = {pool_operations(pool), with, x + first * channels, state, y + first * channels,
                              piece(tokens - first, most, 0)};
        run_items(pool, conv_item, &job, pieces(channels, CHANNELS), 8 * each * job.tokens);
    }
}

typedef struct {
    const operations *isa;
    const moert_delta *rule;
    float *keys;
    int64_t stride;
    int first, tokens, parts;
    int owners; /* heads with keys of their own: all if decays are by row, else one for the heads that share a key */
} delta_job;

static void direct_item(const void *job, int item, void *own) {
    const delta_job *j = job;
    const moert_delta *d = j->rule;
    const int64_t at = ((int64_t)j->first * d->key_heads + item / (j->owners / d->key_heads)) * d->dk;
    const float *decay = d->each > 1 ? d->decay + ((int64_t)j->first * d->heads + item) * d->dk : NULL;
    (void)own;
    j->isa->direct(d->k + at, d->q + at, decay, d->dk, j->keys + item * j->stride);
}

static void delta_item(const void *job, int item, void *own) {
    const delta_job *j = job;
    const moert_delta *d = j->rule;
    const int head = item / j->parts, column = item % j->parts * DELTA_COLUMNS;
    const int64_t at = (int64_t)j->first * d->heads + head;
    (void)own;
    const delta_part part = {
        .keys = j->keys + head / (d->heads / j->owners) * j->stride,
        .v = d->v + at * d->dv + column,
        .decay = d->each > 1 ? NULL : d->decay + at,
        .beta = d->beta + at,
        .state = d->state + (int64_t)head * d->dk * d->dv + column,
        .y = d->y + at * d->dv + column,
        .stride = j->stride * j->owners,
        .across = (int64_t)d->heads * d->dv,
        .tokens = j->tokens,
        .heads = d->heads,
        .dk = d->dk,
        .dv = d->dv,
        .columns = piece(d->dv, DELTA_COLUMNS, item % j->parts),
    };
    j->isa->delta(&part);
}

int moert_delta_rule(moert_pool *pool, const moert_delta *rule) {
    const int most = rule->tokens < TOKENS_AT_ONCE ? rule->tokens : TOKENS_AT_ONCE;
    const int by_row = rule->each > 1, parts = pieces(rule->dv, DELTA_COLUMNS);
    delta_job job = {pool_operations(pool), rule, NULL, (by_row ? 4LL : 2LL) * rule->dk + 1, 0, 0, parts,
                     by_row ? rule->heads : rule->key_heads};
    if (most < 1) return 0;
    job.keys = pool_scratch(pool, (size_t)most * (size_t)job.owners * (size_t)job.stride * sizeof *job.keys);
    if (!job.keys) return -1;
    for (; job.first < rule->tokens; job.first += job.tokens) {
        job.tokens = piece(rule->tokens - job.first, TOKENS_AT_ONCE, 0);
        const int keys = job.tokens * job.owners;
        run_items(pool, direct_item, &job, keys, (by_row ? 32LL : 8LL) * keys * rule->dk);
        run_items(pool, delta_item, &job, rule->heads * job.parts, 8LL * job.tokens * rule->heads * rule->dk * rule->dv);
    }
    return 0;
}

typedef struct {
    const operations *isa;
    const moert_scan *scan;
    int shared, span, parts; /* heads of a group, and of an item; items of a group */
} scan_job;

static void scan_item(const void *job, int item, void *own) {
    const scan_job *j = job;
    const int group = item / j->parts, at = item % j->parts;
    const scan_part part = {j->scan, group * j->shared + at * j->span, piece(j->shared, j->span, at)};
    j->isa->scan(&part, own);
}

int moert_scan_tokens(moert_pool *pool, const moert_scan *scan) {
    const int64_t size = (int64_t)scan->p * scan->n;
    const int shared = scan->heads / scan->groups, span = size < NUMBERS ? (int)(NUMBERS / size) : 1;
    const int most = tokens_at_once(scan->heads * size);
    moert_scan some = *scan;
    const scan_job job = {pool_operations(pool), &some, shared, span < shared ? span : shared, pieces(shared, span)};
    if (pool_own(pool, scan_room(scan, job.span) * sizeof(float))) return -1;
    for (int64_t first = 0; first < scan->tokens; first += most) {
        some.x = scan->x + first * scan->heads * scan->p, some.y = scan->y + first * scan->heads * scan->p;
        some.dt = scan->dt + first * scan->heads;
        some.b = scan->b + first * scan->groups * scan->n, some.c = scan->c + first * scan->groups * scan->n;
        some.tokens = piece(scan->tokens - first, most, 0);
        run_items(pool, scan_item, &job, scan->groups * job.parts, 8LL * some.tokens * scan->heads * size);
    }
    return 0;
}

typedef struct {
    const operations *isa;
    const moert_norm *norm;
    const float *x, *with; /* bias or gate */
    float *y;
    int groups, last, rows, n;
} row_job;

static void softplus_item(const void *job, int item, void *own) {
    const row_job *j = job;
    const int each = rows_an_item(j->n), first = item * each;
    (void)own;
    for (int row = first; row < first + piece(j->rows, each, item); row++)
        j->isa->softplus(j->x + (int64_t)row * j->n, j->with, j->n, j->y + (int64_t)row * j->n);
}

void moert_softplus(moert_pool *pool, int rows, int n, const float *x, const float *bias, float *y) {
    const row_job job = {.isa = pool_operations(pool), .x = x, .with = bias, .y = y, .rows = rows, .n = n};
    run_items(pool, softplus_item, &job, pieces(rows, rows_an_item(n)), 32LL * rows * n);
}

typedef struct {
    const operations *isa;
    const float *x;
    float *y;
    int64_t n;
} sigmoid_job;

static void sigmoid_item(const void *job, int item, void *own) {
    const sigmoid_job *j = job;
    const int64_t first = (int64_t)item * NUMBERS;
    const int n = piece(j->n, NUMBERS, item);
    (void)own;
    for (int i = 0; i < n; i++) j->y[first + i] = 1;
    j->isa->gate(j->x + first, j->y + first, n);
}

void moert_sigmoid(moert_pool *pool, int64_t n, const float *x, float *y) {
    run_items(pool, sigmoid_item, &(sigmoid_job){pool_operations(pool), x, y, n}, pieces(n, NUMBERS), 16 * n);
}

static void norm_parts(const row_job *j, const float *x, float *y) {
    const int size = j->n / j->groups;
    for (int part = 0; part < j->groups; part++) {
        const moert_norm norm = {j->norm->weight + part * size, NULL, j->norm->eps};
        j->isa->norm(x + part * size, &norm, 1, size, y + part * size);
    }
}

static void gated_item(const void *job, int item, void *own) {
    static const moert_act silu = {MOERT_SILU, INFINITY, 1, 0, INFINITY};
    const row_job *j = job;
    const int each = rows_an_item(j->n), first = item * each, normed = j->norm != NULL;
    (void)own;
    for (int row = first; row < first + piece(j->rows, each, item); row++) {
        const int64_t at = (int64_t)row * j->n;
        const float *x = j->x + at;
        float *y = j->y + at;
        if (normed && !j->last) norm_parts(j, x, y);
        else
            for (int i = 0; i < j->n; i++) y[i] = x[i];
        j->isa->activate(&silu, j->with + at, y, j->n);
        if (normed && j->last) norm_parts(j, y, y);
    }
}

void moert_gated(moert_pool *pool, const moert_norm *norm, int groups, int last, int rows, int n, const float *x,
                 const float *gate, float *y) {
    const row_job job = {
        .isa = pool_operations(pool), .norm = norm, .x = x, .with = gate, .y = y, .groups = groups, .last = last,
        .rows = rows, .n = n,
    };
    run_items(pool, gated_item, &job, pieces(rows, rows_an_item(n)), 16LL * rows * n);
}
