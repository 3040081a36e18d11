/* What the tests of attention share: keys and values in memory of exactly their size, problems, and their answers. */
#ifndef ATTEND_H
#define ATTEND_H

#include "driver.h"

/* Keys and values as the kernels take them, for `length` positions. */
typedef struct {
    moert_keys at;
    int heads, dim, length;
    int small;       /* numbers of 8 bits, with steps */
    size_t bytes[4]; /* of keys, values and the steps of both */
} kept;

/* Random ones; not-a-number at positions from .. stop - 1, which are still to be written, and beyond the last. */
kept kept_make(int heads, int dim, int length, int from, int stop);
kept kept_copy(const kept *from);
void kept_free(kept *keys);
int kept_equal(const kept *a, const kept *b);
/* A key or a value [dim] as it is kept. */
void kept_rounded(const kept *keys, const estimate *x, estimate *y);
/* Keys and values [heads, length, dim] as numbers. */
void kept_numbers(const kept *from, estimate *keys, estimate *values);
/* At positions from .. stop - 1 are those numbers; everywhere else nothing has changed. */
void kept_check(const engine *on, const kept *found, const kept *before, int from, int stop, const estimate *keys,
                const estimate *values);

typedef struct {
    problem_matrix q, k, v, o;
    moert_attention block;
    int d_model, tokens, start, length;
    int own;                    /* the block makes keys and values of its tokens, else they are there already */
    float *norm, *q_norm, *k_norm, *sinks, *turns, *x;
    float *bias;                /* [heads, bias_stride], that of a key in the query's own place at bias_middle */
    int bias_middle, bias_stride;
    kept before;
} attend;

/* What the heads work with. */
typedef struct {
    estimate queries;      /* [tokens, heads * head_dim] */
    estimate keys, values; /* [kv_heads, length, head_dim] */
} attend_input;

/* Norm and limit of queries, keys or values of one token, [heads * head_dim]; norm as in moert_attention. */
void attend_finish(const moert_attention *block, const float *norm, int heads, estimate *x);
attend_input attend_project(const attend *a);
void attend_input_free(attend_input *in);
/* The largest query · key of the last token. */
double attend_reach(const attend *a, const attend_input *in);
/* out [tokens, d_model] */
void attend_answer(const attend *a, const attend_input *in, estimate *out);

#endif
