/* Gate and up of feed-forwards, and their activation. */
#ifndef MOERT_EXPANSION_H
#define MOERT_EXPANSION_H

#include "products.h"

/* Of one expert. */
typedef struct {
    const columns *x;
    const moert_ffn *ffn;
    float *hidden; /* [n, d_ff] */
    const moert_act *act;
    int block, items; /* set by expand */
} expansion;

/* Does them all, one expansion an expert; 0, or -1 if memory ran out. */
int expand(moert_pool *pool, expansion *list, int experts);

#endif
