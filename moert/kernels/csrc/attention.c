/* One token through an attention block: norm, q, k and v, positions, the heads, o. */
#include <math.h>
#include <string.h>

#include "products.h"

typedef struct {
    const operations *isa;
    const moert_attention *block;
    const float *query, *keys, *values, *bias;
    int64_t head_stride, bias_stride;
    float *scores, *mixed;
    int length;
} heads_job;

static void head_item(const void *job, int head) {
    const heads_job *j = job;
    const moert_attention *a = j->block;
    const int kv_head = head / (a->heads / a->kv_heads);
    j->isa->head(j->query + (int64_t)head * a->head_dim, j->keys + kv_head * j->head_stride,
                 j->values + kv_head * j->head_stride, j->length, a->head_dim, a->scale,
                 j->bias ? j->bias + head * j->bias_stride : NULL, j->scores + (int64_t)head * j->length,
                 j->mixed + (int64_t)head * a->head_dim);
}

static void clamp(float *x, int n, float limit) {
    for (int i = 0; i < n; i++) x[i] = x[i] > limit ? limit : x[i] < -limit ? -limit : x[i];
}

/* Rotary positions over the two halves of each head; the sines of the first half are negative. */
static void rotate(float *x, int heads, int head_dim, const float *turn) {
    const int half = head_dim / 2;
    const float *cos = turn, *sin = turn + head_dim;
    for (float *end = x + (int64_t)heads * head_dim; x < end; x += head_dim)
        for (int i = 0; i < half; i++) {
            const float low = x[i], high = x[i + half];
            x[i] = low * cos[i] + high * sin[i];
            x[i + half] = high * cos[i + half] + low * sin[i + half];
        }
}

/* q, k and v in one array, with everything done to them that comes before attention. */
static void finish_projections(const operations *isa, const moert_attention *a, float *qkv, const float *turn) {
    const int q = a->heads * a->head_dim, kv = a->k.data ? a->kv_heads * a->head_dim : 0;
    if (a->q_norm) isa->norm(qkv, a->q_norm, a->eps, 1, q, qkv);
    if (a->k_norm && kv) isa->norm(qkv + q, a->k_norm, a->eps, 1, kv, qkv + q);
    if (a->clip < INFINITY) clamp(qkv, q + 2 * kv, a->clip);
    if (turn) rotate(qkv, a->heads + (kv ? a->kv_heads : 0), a->head_dim, turn);
}

int moert_attend(moert_pool *pool, const moert_attention *a, float *x, float *keys, float *values, int64_t head_stride,
                 int length, const float *turn, const float *bias, int64_t bias_stride) {
    const operations *isa = pool_operations(pool);
    const int d_model = a->q.cols, q = a->heads * a->head_dim, own = a->k.data != NULL;
    const int kv = own ? a->kv_heads * a->head_dim : 0;
    input before, after;
    input_begin(&before, isa, NULL, 1, d_model);
    input_begin(&after, isa, NULL, 1, q);
    if (input_wants(&before, &a->q) || input_wants(&after, &a->o)) return -1;
    if (own && (input_wants(&before, &a->k) || input_wants(&before, &a->v))) return -1;
    const size_t normed_bytes = aligned((size_t)d_model * sizeof(float)), mixed_bytes = aligned((size_t)q * sizeof(float));
    const size_t qkv_bytes = aligned((size_t)(q + 2 * kv) * sizeof(float)), before_bytes = input_bytes(&before);
    const size_t scores_bytes = aligned((size_t)a->heads * (size_t)length * sizeof(float));
    char *room = pool_scratch(pool, 2 * normed_bytes + qkv_bytes + mixed_bytes + scores_bytes + before_bytes +
                                        input_bytes(&after));
    if (!room) return -1;
    float *normed = (float *)room, *qkv = (float *)(room += normed_bytes), *mixed = (float *)(room += qkv_bytes);
    float *scores = (float *)(room += mixed_bytes), *added = (float *)(room += scores_bytes);
    room += normed_bytes;

    isa->norm(x, a->norm, a->eps, 1, d_model, normed);
    before.values = normed;
    input_make(&before, pool, room, NULL, 1);
    product projections[3] = {
        {&before, &a->q, qkv, q, NULL, 1, 0, 0},
        {&before, &a->k, qkv + q, kv, NULL, 1, 0, 0},
        {&before, &a->v, qkv + q + kv, kv, NULL, 1, 0, 0},
    };
    run_products(pool, projections, own ? 3 : 1);
    finish_projections(isa, a, qkv, turn);
    for (int head = 0; head < a->kv_heads && own; head++) {
        const int64_t at = head * head_stride + (int64_t)(length - 1) * a->head_dim;
        memcpy(keys + at, qkv + q + head * a->head_dim, (size_t)a->head_dim * sizeof(float));
        memcpy(values + at, qkv + q + kv + head * a->head_dim, (size_t)a->head_dim * sizeof(float));
    }
    const heads_job job = {isa, a, qkv, keys, values, bias, head_stride, bias_stride, scores, mixed, length};
    run_items(pool, head_item, &job, a->heads, 8LL * length * q);

    after.values = mixed;
    input_make(&after, pool, room + before_bytes, NULL, 1);
    product output = {&after, &a->o, added, d_model, NULL, 1, 0, 0};
    run_products(pool, &output, 1);
    isa->add(1, added, x, d_model);
    return 0;
}
