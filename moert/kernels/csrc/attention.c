/* Tokens through an attention block: norm, q, k and v, positions, keys and values kept, the heads, o. One token or many:
 * each gets the same bits. */
#include <math.h>
#include <string.h>

#include "products.h"

typedef struct {
    const operations *isa;
    const moert_attention *block;
    const moert_keys *kept;
    const float *queries, *bias;
    float *mixed;
    int64_t query_stride, bias_stride;
    int tokens, start, length, tiles;
} heads_job;

static head_keys keys_of(const moert_keys *kept, int head) {
    const int64_t size = kept->key_steps ? sizeof(int8_t) : sizeof(uint16_t);
    return (head_keys){
        (char *)kept->keys + head * kept->key_stride * size, (char *)kept->values + head * kept->value_stride * size,
        kept->key_steps ? kept->key_steps + head * kept->key_step_stride : NULL,
        kept->value_steps ? kept->value_steps + head * kept->value_step_stride : NULL,
    };
}

/* A tile of the queries of the heads that share one head of keys. */
static void heads_item(const void *job, int item, void *own) {
    const heads_job *j = job;
    (void)own;
    const moert_attention *a = j->block;
    const int shared = a->heads / a->kv_heads, kv_head = item / j->tiles, all = j->tokens * shared;
    const int first = item % j->tiles * ATTEND_ROWS, rows = all - first < ATTEND_ROWS ? all - first : ATTEND_ROWS;
    const attend_tile tile = {keys_of(j->kept, kv_head), a->head_dim, a->scale, a->softcap};
    attend_row row[ATTEND_ROWS];
    for (int r = 0; r < rows; r++) {
        const int token = (first + r) / shared, head = kv_head * shared + (first + r) % shared, at = j->start + token;
        const int stop = a->causal ? at + 1 : j->length;
        row[r] = (attend_row){
            .query = j->queries + token * j->query_stride + (int64_t)head * a->head_dim,
            .bias = j->bias ? j->bias + head * j->bias_stride - at : NULL,
            .first = a->window && stop > a->window ? stop - a->window : 0,
            .stop = stop,
            .sink = a->sinks ? a->sinks[head] : -INFINITY,
            .mixed = j->mixed + ((int64_t)token * a->heads + head) * a->head_dim,
        };
    }
    j->isa->attend(&tile, rows, row);
}

static void clamp(float *x, int n, float limit) {
    for (int i = 0; i < n; i++) x[i] = x[i] > limit ? limit : x[i] < -limit ? -limit : x[i];
}

/* The first `dims` features of each head turn, i with i + dims / 2; turn: cosines and sines, [2, dims / 2]. */
static void rotate(float *x, int heads, int head_dim, int dims, const float *turn) {
    const int half = dims / 2;
    const float *cos = turn, *sin = turn + half;
    for (float *end = x + (int64_t)heads * head_dim; x < end; x += head_dim)
        for (int i = 0; i < half; i++) {
            const float low = x[i], high = x[i + half];
            x[i] = low * cos[i] - high * sin[i];
            x[i + half] = high * cos[i] + low * sin[i];
        }
}

/* All heads as one vector, or each by itself. */
static void norm_heads(const operations *isa, const moert_attention *a, const float *weight, float *x, int heads) {
    const int width = a->norm_each ? a->head_dim : heads * a->head_dim;
    if (!weight) return;
    for (int at = 0; at < heads * a->head_dim; at += width) isa->norm(x + at, weight, a->eps, 1, width, x + at);
}

static void keep_heads(const operations *isa, const moert_attention *a, const float *key, const float *value, int at,
                       const moert_keys *kept) {
    for (int head = 0; head < a->kv_heads; head++) {
        const head_keys to = keys_of(kept, head);
        isa->keep(key + head * a->head_dim, value + head * a->head_dim, a->head_dim, at, &to);
    }
}

typedef struct {
    const operations *isa;
    const moert_attention *block;
    const moert_keys *kept;
    float *qkv;
    const float *turns;
    int width, start, own;
} finish_job;

/* What is done to q, k and v of one token before the heads; keys and values are kept. */
static void finish_item(const void *job, int token, void *own) {
    const finish_job *j = job;
    (void)own;
    const moert_attention *a = j->block;
    const int q = a->heads * a->head_dim, kv = j->own ? a->kv_heads * a->head_dim : 0, at = j->start + token;
    float *query = j->qkv + (int64_t)token * j->width, *key = query + q, *value = key + kv;
    norm_heads(j->isa, a, a->q_norm, query, a->heads);
    if (j->own) norm_heads(j->isa, a, a->k_norm, key, a->kv_heads);
    if (a->clip < INFINITY) clamp(query, q + 2 * kv, a->clip);
    if (j->turns) {
        const float *turn = j->turns + (int64_t)token * a->rope_dims;
        rotate(query, a->heads, a->head_dim, a->rope_dims, turn);
        if (j->own) rotate(key, a->kv_heads, a->head_dim, a->rope_dims, turn);
    }
    if (j->own) keep_heads(j->isa, a, key, value, at, j->kept);
}

int moert_attend(moert_pool *pool, const moert_attention *a, int tokens, float *x, const moert_keys *kept, int start,
                 int length, const float *turns, const float *bias, int64_t bias_stride) {
    const operations *isa = pool_operations(pool);
    const int d_model = a->q.cols, q = a->heads * a->head_dim, own = a->k.data != NULL;
    const int kv = own ? a->kv_heads * a->head_dim : 0, width = q + 2 * kv;
    input before, after;
    columns x_before, x_after;
    input_begin(&before, isa, NULL, tokens, d_model);
    input_begin(&after, isa, NULL, tokens, q);
    columns_begin(&x_before, &before, NULL, tokens);
    columns_begin(&x_after, &after, NULL, tokens);
    if (input_wants(&before, &x_before, &a->q) || input_wants(&after, &x_after, &a->o)) return -1;
    if (own && (input_wants(&before, &x_before, &a->k) || input_wants(&before, &x_before, &a->v))) return -1;
    const size_t n = (size_t)tokens, normed_bytes = aligned(n * (size_t)d_model * sizeof(float));
    const size_t mixed_bytes = aligned(n * (size_t)q * sizeof(float)), qkv_bytes = aligned(n * (size_t)width * sizeof(float));
    const size_t before_bytes = input_bytes(&before, &x_before, 1), after_bytes = input_bytes(&after, &x_after, 1);
    char *room = pool_scratch(pool, normed_bytes + qkv_bytes + mixed_bytes + before_bytes + after_bytes);
    if (!room) return -1;
    float *normed = (float *)room, *qkv = (float *)(room += normed_bytes), *mixed = (float *)(room += qkv_bytes);
    room += mixed_bytes;

    moert_norm(pool, a->norm, a->eps, tokens, d_model, x, normed);
    before.values = normed;
    input_make(&before, &x_before, 1, pool, room, NULL, tokens);
    product projections[3] = {
        {&x_before, &a->q, qkv, width, 0, 0},
        {&x_before, &a->k, qkv + q, width, 0, 0},
        {&x_before, &a->v, qkv + q + kv, width, 0, 0},
    };
    if (run_products(pool, projections, own ? 3 : 1)) return -1;
    run_items(pool, finish_item, &(finish_job){isa, a, kept, qkv, turns, width, start, own}, tokens, 8LL * tokens * width);

    const int rows = tokens * (a->heads / a->kv_heads), tiles = (rows + ATTEND_ROWS - 1) / ATTEND_ROWS;
    const heads_job heads = {isa, a, kept, qkv, bias, mixed, width, bias_stride, tokens, start, length, tiles};
    run_items(pool, heads_item, &heads, a->kv_heads * tiles, 4LL * length * q * tokens);

    after.values = mixed;
    input_make(&after, &x_after, 1, pool, room + before_bytes, NULL, tokens);
    product output = {&x_after, &a->o, normed, d_model, 0, 0};
    if (run_products(pool, &output, 1)) return -1;
    for (int token = 0; token < tokens; token++)
        isa->add(1, normed + (int64_t)token * d_model, x + (int64_t)token * d_model, d_model);
    return 0;
}

int moert_keep(moert_pool *pool, const moert_attention *a, int tokens, const float *encoded, int start,
               const moert_keys *kept) {
    const operations *isa = pool_operations(pool);
    const int kv = a->kv_heads * a->head_dim;
    input in;
    columns all;
    input_begin(&in, isa, encoded, tokens, a->k.cols);
    columns_begin(&all, &in, NULL, tokens);
    if (input_wants(&in, &all, &a->k) || input_wants(&in, &all, &a->v)) return -1;
    const size_t both_bytes = aligned((size_t)tokens * (size_t)(2 * kv) * sizeof(float));
    char *room = pool_scratch(pool, both_bytes + input_bytes(&in, &all, 1));
    if (!room) return -1;
    float *both = (float *)room;
    input_make(&in, &all, 1, pool, room + both_bytes, NULL, tokens);
    product projections[2] = {
        {&all, &a->k, both, 2 * kv, 0, 0},
        {&all, &a->v, both + kv, 2 * kv, 0, 0},
    };
    if (run_products(pool, projections, 2)) return -1;
    for (int token = 0; token < tokens; token++) {
        float *key = both + (int64_t)token * 2 * kv, *value = key + kv;
        norm_heads(isa, a, a->k_norm, key, a->kv_heads);
        if (a->clip < INFINITY) clamp(key, 2 * kv, a->clip);
        keep_heads(isa, a, key, value, start + token, kept);
    }
    return 0;
}
