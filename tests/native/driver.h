/* The native kernels on every instruction set that runs here, with one thread and with three. */
#ifndef DRIVER_H
#define DRIVER_H

#include "problem.h"

typedef struct {
    const char *isa;
    int threads;
    moert_pool *pool;
} engine;

extern engine engines[];
extern int engine_count;
extern int apart; /* of the slower cases every so many are run: it has no factor of what they go through in turn */

/* The case that runs now, for messages: a printf format. */
void describe(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Counts a failure if a number is not where it must be. Tells the first of each case. */
void check(const engine *on, const char *what, const float *found, const estimate *expected, int length);
void require(const engine *on, int holds, const char *what);
/* The numbers as bits, into the engine's hash or (on NULL) into the one that is expected. */
void hash(const engine *on, const float *numbers, int length);

/* Where a result is the same, bit by bit: on all engines of one machine, if a function of the C library is in it, or on
 * all machines. */
enum { HERE, EVERYWHERE };
/* What the first engine finds is kept in `first`, what the others find must be the same. */
void agree(const engine *on, const char *what, const float *found, float *first, int length, int where);
/* What has been found once more on the same engine, in another way, must be the same. */
void again(const engine *on, const char *what, const float *found, const float *before, int length);

void fill(float *numbers, int length); /* with NaN: all must be written */

void linear_cases(void);
void rows_cases(void);
void mixture_cases(void);
void fire_cases(void);
void project_cases(void);
void attend_cases(void);
void latent_cases(void);
void keep_cases(void);
void norm_cases(void);
void head_cases(void);
void scores_cases(void);
void choose_cases(void);
void gate_cases(void);
void conv_cases(void);
void delta_cases(void);
void scan_cases(void);
void lstm_cases(void);
void sparse_cases(void);
void softplus_cases(void);
void balance_cases(void);
void gated_cases(void);
void wild_cases(void);
void exact_cases(void);
void coding_cases(void);
void reads_cases(void);

#endif
