/* Tokens through an attention block: norm, q, k and v, positions, keys and values kept, the heads, o. One token or many:
 * each gets the same bits. */
#include <math.h>

#include "heads.h"

static void clamp(float *x, int n, float limit) {
    for (int i = 0; i < n; i++) x[i] = x[i] > limit ? limit : x[i] < -limit ? -limit : x[i];
}

/* Each run of `width` numbers by itself. */
static void norm_runs(const operations *isa, const moert_norm *norm, float *x, int n, int width) {
    for (int at = 0; norm->weight && at < n; at += width) isa->norm(x + at, norm, 1, width, x + at);
}

/* Queries or keys of one token: normed, bounded, turned. */
static void finish(const operations *isa, const moert_attention *a, const moert_norm *norm, float *x, int heads,
                   const float *turn) {
    const int dim = a->heads.dim, n = heads * dim, width = a->norm_each ? dim : n;
    if (!a->norm_turned) norm_runs(isa, norm, x, n, width);
    if (a->clip < INFINITY) clamp(x, n, a->clip);
    if (turn) rotate(x, heads, dim, a->rope_dims, turn);
    if (a->norm_turned) norm_runs(isa, norm, x, n, width);
}

static void finish_values(const operations *isa, const moert_attention *a, float *x) {
    const int dim = a->heads.value_dim, n = a->heads.kv * dim;
    norm_runs(isa, &a->v_norm, x, n, dim);
    if (a->clip < INFINITY) clamp(x, n, a->clip);
}

/* Keys and values come in one row of `width`, behind the queries of a token where there are any. */
typedef struct {
    const operations *isa;
    const moert_attention *block;
    const moert_keys *kept;
    const moert_positions *at;
    float *rows;
    int width, start, queries, own;
} finish_job;

static void finish_item(const void *job, int token, void *own) {
    const finish_job *j = job;
    (void)own;
    const moert_attention *a = j->block;
    const moert_heads *h = &a->heads;
    float *query = j->rows + (int64_t)token * j->width, *key = query + (j->queries ? h->n * h->dim : 0);
    const float *turn = j->at && j->at->turns ? j->at->turns + (int64_t)token * a->rope_dims : NULL;
    if (j->queries) {
        finish(j->isa, a, &a->q_norm, query, h->n, turn);
        if (j->at->query_scale)
            for (int i = 0; i < h->n * h->dim; i++) query[i] *= j->at->query_scale[token];
    }
    if (!j->own) return;
    finish(j->isa, a, &a->k_norm, key, h->kv, turn);
    finish_values(j->isa, a, key + h->kv * h->dim);
    keep_heads(j->isa, h, key, key + h->kv * h->dim, j->start + token, j->kept);
}

typedef struct {
    const operations *isa;
    float *gate, *mixed;
    int n, gates;
} gate_job;

/* Each of `gates` numbers becomes n / gates alike, in place. */
static void repeat(float *x, int gates, int n) {
    const int dim = n / gates;
    for (int gate = gates - 1; gate >= 0; gate--) {
        const float one = x[gate];
        for (int i = 0; i < dim; i++) x[gate * dim + i] = one;
    }
}

static void gate_item(const void *job, int token, void *own) {
    const gate_job *j = job;
    (void)own;
    float *gate = j->gate + (int64_t)token * j->n;
    if (j->gates < j->n) repeat(gate, j->gates, j->n);
    j->isa->gate(gate, j->mixed + (int64_t)token * j->n, j->n);
}

int moert_attend(moert_pool *pool, const moert_attention *a, int tokens, float *x, const moert_keys *kept, int start,
                 int length, const moert_positions *at) {
    const operations *isa = pool_operations(pool);
    const moert_heads *h = &a->heads;
    const int d_model = a->q.cols, q = h->n * h->dim, mixes = h->n * h->value_dim, own = a->k.data != NULL, gated = a->gate.data != NULL;
    const int k = own ? h->kv * h->dim : 0, v = own ? h->kv * h->value_dim : 0, width = q + k + v;
    input before, after;
    columns x_before, x_after;
    input_begin(&before, isa, NULL, tokens, d_model);
    input_begin(&after, isa, NULL, tokens, mixes);
    columns_begin(&x_before, &before, NULL, tokens);
    columns_begin(&x_after, &after, NULL, tokens);
    if (input_wants(&before, &x_before, &a->q) || input_wants(&after, &x_after, &a->o)) return -1;
    if (own && (input_wants(&before, &x_before, &a->k) || input_wants(&before, &x_before, &a->v))) return -1;
    if (gated && input_wants(&before, &x_before, &a->gate)) return -1;
    const size_t n = (size_t)tokens * sizeof(float), normed_bytes = aligned(n * (size_t)d_model);
    const size_t mixed_bytes = aligned(n * (size_t)mixes), qkv_bytes = aligned(n * (size_t)width);
    const size_t before_bytes = input_bytes(&before, &x_before, 1), after_bytes = input_bytes(&after, &x_after, 1);
    const size_t floats_bytes = normed_bytes + qkv_bytes + mixed_bytes * (size_t)(1 + gated);
    char *room = pool_scratch(pool, floats_bytes + before_bytes + after_bytes);
    if (!room) return -1;
    float *normed = (float *)room, *qkv = (float *)(room + normed_bytes), *mixed = (float *)(room + normed_bytes + qkv_bytes);
    float *gate = (float *)(room + normed_bytes + qkv_bytes + mixed_bytes);
    room += floats_bytes;

    moert_normalise(pool, &a->norm, tokens, d_model, x, normed);
    before.values = normed;
    input_make(&before, &x_before, 1, pool, room, NULL, tokens);
    product projections[4] = {{&x_before, &a->q, qkv, width, 0, 0, 0, 0}};
    int count = 1;
    if (own) {
        projections[count++] = (product){&x_before, &a->k, qkv + q, width, 0, 0, 0, 0};
        projections[count++] = (product){&x_before, &a->v, qkv + q + k, width, 0, 0, 0, 0};
    }
    if (gated) projections[count++] = (product){&x_before, &a->gate, gate, mixes, 0, 0, 0, 0};
    if (run_products(pool, projections, count)) return -1;
    const finish_job finishing = {isa, a, kept, at, qkv, width, start, 1, own};
    run_items(pool, finish_item, &finishing, tokens, 8LL * tokens * width);

    heads_job heads = {isa, h, kept, at, qkv, mixed, width, mixes, h->value_dim, tokens, start, length, 0};
    run_heads(pool, &heads);
    if (gated) run_items(pool, gate_item, &(gate_job){isa, gate, mixed, mixes, a->gate.rows}, tokens, 16LL * tokens * mixes);

    after.values = mixed;
    input_make(&after, &x_after, 1, pool, room + before_bytes, NULL, tokens);
    product output = {&x_after, &a->o, normed, d_model, 0, 0, 0, 0};
    if (run_products(pool, &output, 1)) return -1;
    add_made(pool, &a->after, a->add, tokens, d_model, normed, x);
    return 0;
}

int moert_keep(moert_pool *pool, const moert_attention *a, int tokens, const float *encoded, int start,
               const moert_keys *kept) {
    const operations *isa = pool_operations(pool);
    const int k = a->heads.kv * a->heads.dim, width = k + a->heads.kv * a->heads.value_dim;
    input in;
    columns all;
    input_begin(&in, isa, encoded, tokens, a->k.cols);
    columns_begin(&all, &in, NULL, tokens);
    if (input_wants(&in, &all, &a->k) || input_wants(&in, &all, &a->v)) return -1;
    const size_t both_bytes = aligned((size_t)tokens * (size_t)width * sizeof(float));
    char *room = pool_scratch(pool, both_bytes + input_bytes(&in, &all, 1));
    if (!room) return -1;
    float *both = (float *)room;
    input_make(&in, &all, 1, pool, room + both_bytes, NULL, tokens);
    product projections[2] = {
        {&all, &a->k, both, width, 0, 0, 0, 0},
        {&all, &a->v, both + k, width, 0, 0, 0, 0},
    };
    if (run_products(pool, projections, 2)) return -1;
    run_items(pool, finish_item, &(finish_job){isa, a, kept, NULL, both, width, start, 0, 1}, tokens, 8LL * tokens * width);
    return 0;
}
