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

/* Tokens of an input that are multiplied with the same matrices. */
typedef struct {
    const input *in;
    const int32_t *tokens; /* NULL: 0 .. n - 1 */
    int n;
    panels of[MOST_GROUPINGS]; /* for each grouping of the input; n = 0 where no matrix wants them */
    int items;                 /* panels to fill in; of the groupings one after the other */
} columns;

void input_begin(input *in, const operations *isa, const float *values, int tokens, int cols);
void columns_begin(columns *x, const input *in, const int32_t *tokens, int n);
/* Takes note of a matrix that some of the input will be multiplied with; 0, or -1 if there are too many group sizes. */
int input_wants(input *in, columns *x, const moert_matrix *w);
/* What the rounded activations and `count` columns of them take. */
size_t input_bytes(const input *in, const columns *x, int count);
/* Makes the rounded activations of n tokens (0 .. n - 1 where NULL), and the columns, in `room` and on all threads. */
void input_make(input *in, columns *x, int count, moert_pool *pool, void *room, const int32_t *tokens, int n);

/* y[t * stride + row - first] = matrix · token t of the columns. `own`: multiply_bytes. */
void multiply(const columns *x, const moert_matrix *w, int first, int stop, float *y, int64_t stride, void *own);
size_t multiply_bytes(const columns *x, const moert_matrix *w);

/* Rows of a matrix, of `rows` that are multiplied, that make one item for n tokens, in a job that reads `bytes` of weights in all. */
int item_rows(const moert_pool *pool, const moert_matrix *w, int rows, int n, int64_t bytes);
int64_t matrix_bytes(const moert_matrix *w);

/* One matrix of several that are multiplied as one job, or `rows` of its rows from `first` on; 0: all. */
typedef struct {
    const columns *x;
    const moert_matrix *w;
    float *y;
    int64_t stride;
    int block, items; /* set by run_products */
    int first, rows;
} product;

typedef struct {
    const product *products;
    int count;
} products;

/* 0, or -1 if memory ran out. */
int run_products(moert_pool *pool, product *list, int count);

/* Which of `count` lists of items the item belongs to; it is counted within that one afterwards. */
#define LOCATE(at, item, list, count)                               \
    int at = 0;                                                     \
    while (at < (count)-1 && (item) >= (list)[at].items) (item) -= (list)[at++].items

/* How many pieces n has, and what of it is in piece `item`. */
static inline int pieces(int64_t n, int64_t size) { return (int)((n + size - 1) / size); }
static inline int piece(int64_t n, int64_t size, int64_t item) {
    return (int)(n - item * size < size ? n - item * size : size);
}

/* As pool_run, but alone where the job (bytes of weights, times tokens) is not worth another thread's attention. */
void run_items(moert_pool *pool, work run, const void *job, int n, int64_t amount);

#endif
