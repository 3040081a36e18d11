/* Heads of attention: what blocks of every kind share. */
#ifndef MOERT_HEADS_H
#define MOERT_HEADS_H

#include "products.h"

/* Queries [tokens, n, dim] from position `start` on, of rows `query_stride` apart; what they read goes to
 * mixed[token * mixed_token + head * mixed_head]. */
typedef struct {
    const operations *isa;
    const moert_heads *heads;
    const moert_keys *kept;
    const moert_positions *at;
    const float *queries;
    float *mixed;
    int64_t query_stride, mixed_token, mixed_head;
    int tokens, start, length;
    int tiles; /* set by run_heads */
} heads_job;

void run_heads(moert_pool *pool, heads_job *job);

/* The first `dims` of each head's `dim` features turn, i with i + dims / 2; turn: cosines and sines, [2, dims / 2]. */
void rotate(float *x, int heads, int dim, int dims, const float *turn);

/* The key [dim] and the value [value_dim] of each head of one token, of its position `at`. */
void keep_heads(const operations *isa, const moert_heads *heads, const float *key, const float *value, int at,
                const moert_keys *kept);

/* x [tokens, d_model] += add * after(made), which it spoils. */
void add_made(moert_pool *pool, const moert_norm *after, float add, int tokens, int d_model, float *made, float *x);

#endif
