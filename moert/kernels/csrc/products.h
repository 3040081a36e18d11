/* Matrices times activations, cut into items for the pool. */
#ifndef MOERT_PRODUCTS_H
#define MOERT_PRODUCTS_H

#include "internal.h"

#define MOST_GROUPINGS 8 /* different group sizes among matrices that take the same input */

/* The same activations [tokens, cols] for matrices of floats, and rounded for each group size of those with codes. */
typedef struct {
    const operations *isa;
    const float *values;
    int tokens, cols, count;
    int orders[MOST_GROUPINGS];
    operand rounded[MOST_GROUPINGS];
} input;

void input_begin(input *in, const operations *isa, const float *values, int tokens, int cols);
/* Takes note of a matrix that will be multiplied with the input; 0, or -1 if there are too many group sizes. */
int input_wants(input *in, const moert_matrix *w);
size_t input_bytes(const input *in);
/* Makes the rounded activations of n tokens (0 .. n - 1 where NULL), in `room` and on all threads. */
void input_make(input *in, moert_pool *pool, void *room, const int32_t *tokens, int n);

/* y[t * stride + row - first], as in `operations`. */
void multiply(const input *in, const moert_matrix *w, const int32_t *tokens, int n, int first, int stop, float *y,
              int64_t stride);

/* Rows of a matrix that make one item for n tokens, in a job that reads `bytes` of weights in all. */
int item_rows(const moert_pool *pool, const moert_matrix *w, int n, int64_t bytes);
int64_t matrix_bytes(const moert_matrix *w);

/* One matrix of several that are multiplied as one job. */
typedef struct {
    const input *in;
    const moert_matrix *w;
    float *y;
    int64_t stride;
    const int32_t *tokens; /* NULL: 0 .. n - 1 */
    int n;
    int block, items; /* set by run_products */
} product;

typedef struct {
    const product *products;
    int count;
} products;

void run_products(moert_pool *pool, product *list, int count);

/* Which of `count` lists of items the item belongs to; it is counted within that one afterwards. */
#define LOCATE(at, item, list, count)                               \
    int at = 0;                                                     \
    while (at < (count)-1 && (item) >= (list)[at].items) (item) -= (list)[at++].items

/* As pool_run, but alone where the job (bytes of weights, times tokens) is not worth another thread's attention. */
void run_items(moert_pool *pool, work run, const void *job, int n, int64_t amount);

#endif
