/* What the tests of the native kernels share: random problems in exactly sized buffers, and plain arithmetic. */
#ifndef PROBLEM_H
#define PROBLEM_H

#include "moert.h"

/* Largest error that a sum may have, as a share of the sum of its terms' magnitudes. */
#define FINAL 1e-5 /* of a result */
#define INNER 2e-6 /* of something that is computed with again */

/* One of these whole numbers. */
#define PICK(...) (((const int[]){__VA_ARGS__})[draw((int)(sizeof((const int[]){__VA_ARGS__}) / sizeof(int)))])

/* A matrix as the kernels take it and in double precision. magnitude: |scale| code + |minimum|, or |weight|. */
typedef struct {
    moert_matrix matrix;
    double *weight, *magnitude; /* [rows, cols] */
} problem_matrix;

/* How scales and weights are drawn. UNIT: scales 1, minima -2. SELECT: row r is 1 at input r mod cols, else 0. Of the
 * others one in three has a bias. */
enum { PLAIN, EXTREME, UNIT, SELECT };

/* Numbers that are known up to an error. error is NULL where they are exact float32. */
typedef struct {
    double *value, *error; /* [length] */
} estimate;

void *claim(size_t bytes); /* exactly sized, so that a sanitizer sees the first byte read beyond it */
void seed(uint64_t value);
int draw(int below); /* twice in one expression only in an order that C fixes: inputs are the same everywhere */
float draw_float(void); /* -2 .. 2, mostly small */
float *draw_floats(int length);
/* Float16: between 2^-7 and 2, or with EXTREME now and then at the ends of what it holds. */
uint16_t draw_half(int style);
double half_value(uint16_t half);

problem_matrix matrix_make(int kind, int rows, int cols, int group, int style);
void matrix_free(problem_matrix *matrix);
/* Rows of a matrix for plain_multiply; nothing to be freed. */
problem_matrix matrix_rows(const problem_matrix *matrix, int first, int count);

moert_norm norm_make(int length, float eps); /* one in three has a bias */
void norm_free(moert_norm *norm);

estimate estimate_make(int length);
estimate estimate_of(const float *values, int length);
estimate estimate_at(const estimate *numbers, int at); /* those from `at` on; nothing to be freed */
void estimate_free(estimate *numbers);

/* y = matrix · x, with x rounded as the kernels round it where the matrix holds codes. */
void plain_multiply(const problem_matrix *matrix, const estimate *x, double share, estimate *y);
/* norm(x) · factor; y may be x */
void plain_norm(const estimate *x, const moert_norm *norm, float factor, int length, estimate *y);
/* x = softcap · tanh(x / softcap); 0: as it is */
void plain_cap(estimate *x, float softcap, int length);
/* 1 / (1 + e^-x) */
void plain_sigmoid(const estimate *x, int length, estimate *y);
/* hidden = act(gate) · (up + plus), or act(up) where gate is NULL */
void plain_activate(const moert_act *act, const estimate *gate, const estimate *up, int length, estimate *hidden);

#endif
