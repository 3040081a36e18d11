/* Heads of attention: queries meet the keys and values that are kept. */
#include "heads.h"

#include <math.h>

static head_keys keys_of(const moert_keys *kept, int head) {
    const int64_t at = head * kept->head;
    return (head_keys){kept->pages, at, at + kept->values, at + kept->key_steps, at + kept->value_steps, kept->small};
}

/* The first key that a query at this position sees, if it sees those before `stop`. */
static int first_seen(const moert_heads *heads, int at, int stop) {
    const int window = heads->window && stop > heads->window ? stop - heads->window : 0;
    const int chunk = heads->chunk ? at / heads->chunk * heads->chunk : 0;
    return window > chunk ? window : chunk;
}

/* A tile of the queries of the heads that share one head of keys. */
static void heads_item(const void *job, int item, void *own) {
    const heads_job *j = job;
    (void)own;
    const moert_heads *h = j->heads;
    const int shared = h->n / h->kv, kv_head = item / j->tiles, all = j->tokens * shared;
    const int first = item % j->tiles * ATTEND_ROWS, rows = all - first < ATTEND_ROWS ? all - first : ATTEND_ROWS;
    const attend_tile tile = {keys_of(j->kept, kv_head), h->dim, h->value_dim, h->scale, h->softcap};
    attend_row row[ATTEND_ROWS];
    for (int r = 0; r < rows; r++) {
        const int token = (first + r) / shared, head = kv_head * shared + (first + r) % shared, at = j->start + token;
        const int stop = h->causal ? at + 1 : j->length;
        row[r] = (attend_row){
            .query = j->queries + token * j->query_stride + (int64_t)head * h->dim,
            .bias = j->at->bias ? j->at->bias + head * j->at->bias_stride - at : NULL,
            .first = first_seen(h, at, stop),
            .stop = stop,
            .sink = h->sinks ? h->sinks[head] : -INFINITY,
            .mixed = j->mixed + token * j->mixed_token + head * j->mixed_head,
        };
    }
    j->isa->attend(&tile, rows, row);
}

void run_heads(moert_pool *pool, heads_job *job) {
    const moert_heads *h = job->heads;
    const int rows = job->tokens * (h->n / h->kv);
    job->tiles = (rows + ATTEND_ROWS - 1) / ATTEND_ROWS;
    run_items(pool, heads_item, job, h->kv * job->tiles, 2LL * job->length * h->n * (h->dim + h->value_dim) * job->tokens);
}

void rotate(float *x, int heads, int dim, int dims, const float *turn) {
    const int half = dims / 2;
    const float *cos = turn, *sin = turn + half;
    for (float *end = x + (int64_t)heads * dim; x < end; x += dim)
        for (int i = 0; i < half; i++) {
            const float low = x[i], high = x[i + half];
            x[i] = low * cos[i] - high * sin[i];
            x[i + half] = high * cos[i] + low * sin[i];
        }
}

void keep_heads(const operations *isa, const moert_heads *heads, const float *key, const float *value, int at,
                const moert_keys *kept) {
    for (int head = 0; head < heads->kv; head++) {
        const head_keys to = keys_of(kept, head);
        isa->keep(key + head * heads->dim, heads->dim, value + head * heads->value_dim, heads->value_dim, at, &to);
    }
}

typedef struct {
    const operations *isa;
    const moert_norm *after;
    float add, *made, *x;
    int d_model;
} add_job;

static void add_item(const void *job, int token, void *own) {
    const add_job *j = job;
    float *made = j->made + (int64_t)token * j->d_model;
    (void)own;
    if (j->after->weight) j->isa->norm(made, j->after, 1, j->d_model, made);
    j->isa->add(j->add, made, j->x + (int64_t)token * j->d_model, j->d_model);
}

void add_made(moert_pool *pool, const moert_norm *after, float add, int tokens, int d_model, float *made, float *x) {
    const add_job job = {pool_operations(pool), after, add, made, x, d_model};
    run_items(pool, add_item, &job, tokens, 8LL * tokens * d_model);
}
