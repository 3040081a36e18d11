/* What the files of this library share: activations as the kernels want them, one table of functions for each
 * instruction set, and the pool. */
#ifndef MOERT_INTERNAL_H
#define MOERT_INTERNAL_H

#include <stddef.h>
#include <stdint.h>

#include "moert.h"

#define ALIGN 64

/* Codes of a row lie in planes: byte k of a plane of width b holds the inputs k * 8/b and following. Vectors of codes
 * taken out of such bytes are not in the order of the inputs, so activations are kept in the same order instead. */
enum { WHOLE, HALVES, QUARTERS, ORDERS }; /* one, two or four inputs a byte: 8 bits; 4 bits; 2 and 3 bits */

/* Activations [tokens, cols] rounded to 8 bits, for matrices whose scales cover `group` inputs.
 * A lane is what one int32 of a vector sums up: 4, 8 or 16 neighbouring inputs, by order. */
typedef struct {
    int tokens, cols, group, groups;
    int padded;                 /* cols up to a whole number of vectors in every order; zeros beyond cols */
    int groups_padded;
    int8_t *bytes[ORDERS];      /* [tokens, padded]; NULL where no matrix wants the order */
    float *lanes[ORDERS];       /* [tokens, padded / inputs a lane]: the scale of each lane */
    int32_t *index[ORDERS];     /* [ratio, lanes a vector]: which of a vector of group scales each lane takes */
    int ratio[ORDERS];          /* vectors of codes for each vector of group scales; 0: groups cut through lanes */
    float *blocks;              /* [tokens, padded / MOERT_BLOCK]: the scales */
    float *sums;                /* [tokens, groups_padded]: sum of the rounded activations of each group */
} operand;

typedef struct {
    const char *name;
    int (*runs)(void);
    size_t (*operand_bytes)(int tokens, int cols, int group, int orders);
    /* Lays the operand out in `room` (operand_bytes, aligned) without filling it in. */
    void (*operand_place)(operand *x, void *room, int tokens, int cols, int group, int orders);
    /* Rounds the activations of one token into its place. */
    void (*operand_fill)(const operand *x, int token, const float *values);
    /* y[t * stride + row - first] for rows first .. stop - 1 and t < n: matrix · token tokens[t] (t where NULL). */
    void (*codes)(const moert_matrix *w, const operand *x, const int32_t *tokens, int n, int first, int stop, float *y,
                  int64_t stride);
    /* The same for matrices of floats and x [tokens, cols]. */
    void (*floats)(const moert_matrix *w, const float *x, const int32_t *tokens, int n, int first, int stop, float *y,
                   int64_t stride);
    /* y [cols]: one row of a matrix. */
    void (*row)(const moert_matrix *w, int64_t row, float *y);
    void (*norm)(const float *x, const float *weight, float eps, float factor, int n, float *y);
    /* up ← act(gate) * up, or act(up) where gate is NULL */
    void (*activate)(int activation, float limit, const float *gate, float *up, int n);
    /* One head: scores [length] is scratch, mixed [head_dim] the result. */
    void (*head)(const float *query, const float *keys, const float *values, int length, int head_dim, float scale,
                 const float *bias, float *scores, float *mixed);
    /* y [n] += weight * x [n] */
    void (*add)(float weight, const float *x, float *y, int n);
} operations;

extern const operations *const moert_isas[];
extern const int moert_isas_count;

/* A piece of work: item `item` of a job, run by any thread. */
typedef void (*work)(const void *job, int item);

const operations *pool_operations(const moert_pool *pool);
int pool_threads(const moert_pool *pool);

/* Runs items 0 .. n - 1 on all threads, and returns when all are done. */
void pool_run(moert_pool *pool, work run, const void *job, int n);

/* `bytes` of aligned memory that stay the caller's until the next call; NULL if there is none. */
void *pool_scratch(moert_pool *pool, size_t bytes);

static inline size_t aligned(size_t bytes) { return (bytes + ALIGN - 1) / ALIGN * ALIGN; }
static inline int is_codes(const moert_matrix *w) { return w->kind < MOERT_F16; }
static inline int order_of(int bits) { return bits == 8 ? WHOLE : bits == 4 ? HALVES : QUARTERS; }
static inline int inputs_a_lane(int order) { return 4 << order; }
static inline int groups_of(int cols, int group) { return (cols + group - 1) / group; }
static inline int64_t row_bytes(int cols, int bits) {
    return bits == 3 ? (cols + 3) / 4 + (cols + 7) / 8 : ((int64_t)cols * bits + 7) / 8;
}

#endif
