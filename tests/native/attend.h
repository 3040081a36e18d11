/* What the tests of attention share: keys and values in pages of exactly their size, problems, and their answers. */
#ifndef ATTEND_H
#define ATTEND_H

#include "driver.h"

/* Keys and values as the kernels take them, for `length` positions. */
typedef struct {
    moert_keys at;
    void **pages;
    int heads, dim, value_dim, length;
    int count;         /* of pages */
    size_t page_bytes; /* of each */
} kept;

/* Random ones; not-a-number at positions from .. stop - 1, which are still to be written, and beyond the last. */
kept kept_make(const moert_heads *heads, int length, int from, int stop);
kept kept_copy(const kept *from);
void kept_free(kept *keys);
int kept_equal(const kept *a, const kept *b);
/* Keys [heads, length, dim] and values [heads, length, value_dim] as numbers. */
void kept_numbers(const kept *from, estimate *keys, estimate *values);
/* The key [heads, dim] and the value [heads, value_dim] of one position among such numbers, as they are kept. */
void kept_put(const kept *keys, int at, const estimate *key, const estimate *value, estimate *all_keys,
              estimate *all_values);
/* At positions from .. stop - 1 are those numbers; everywhere else nothing has changed. */
void kept_check(const engine *on, const kept *found, const kept *before, int from, int stop, const estimate *keys,
                const estimate *values);

/* Tokens of one sequence, and the block that they pass: one of the two. */
typedef struct {
    moert_attention *heads;
    moert_latent *latent;
    int d_model, tokens, start, length;
    int own;              /* the block makes keys and values of its tokens, else they are there already */
    int rope_dims;
    float *x;             /* [tokens, d_model] */
    float *turns;         /* or NULL, as the next two */
    float *bias;          /* [heads, bias_stride], that of a key in the query's own place at bias_middle */
    float *query_scale;
    int bias_middle, bias_stride;
    kept before;
} sequence;

/* What the heads work with. */
typedef struct {
    const moert_heads *heads;
    estimate queries; /* [tokens, n, dim] */
    estimate keys;    /* [kv, length, dim] */
    estimate values;  /* [kv, length, value_dim] */
} reading;

const moert_heads *sequence_heads(const sequence *s);
/* Draws what the heads do and where the tokens stand, before the block is made, and the rest after it. */
void draw_heads(sequence *s, moert_heads *heads);
void draw_sequence(sequence *s);
void sequence_free(sequence *s);
/* Runs it on all engines, at once and in pieces; out [tokens, d_model] is the answer. */
void run_sequence(const sequence *s, const reading *r, const estimate *out);

/* Room for queries; keys and values that are there already. */
reading reading_make(const sequence *s);
void reading_free(reading *r);
/* The largest query · key of the last token. */
double reading_reach(const sequence *s, const reading *r);
/* mixed [n, value_dim]: what the heads read for one token */
void plain_heads(const sequence *s, const reading *r, int token, estimate *mixed);
/* The first key that a query at this position sees, if it sees those before `stop`. */
int plain_first(const moert_heads *heads, int at, int stop);
/* The first features of each head turn. */
void plain_turn(const sequence *s, int token, int heads, int dim, estimate *x);
void plain_query_scale(const sequence *s, int token, int length, estimate *x);
/* out = x + add · after(made), which it spoils; all [d_model] of one token */
void plain_join(const sequence *s, int token, const moert_norm *after, float add, estimate *made, estimate *out);

/* Norm and limit of queries, keys or values of one token, [heads * dim] or [heads * value_dim], and their turn. s NULL:
 * they do not turn. */
void plain_finish(const sequence *s, const moert_attention *block, int token, const moert_norm *norm, int heads,
                  estimate *x);
void plain_finish_values(const moert_attention *block, estimate *x);

#endif
