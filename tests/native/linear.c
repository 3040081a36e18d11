/* moert_linear: every kind and group at odd shapes, with and without biases; moert_rows. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"

static const int kinds[] = {2, 3, 4, MOERT_MXFP4, 8, MOERT_F16, MOERT_BF16, MOERT_F32, -2, -3, -4, -5, -6, -8};
static const int groups[] = {0, 16, 32, 64, 128, 10, 48};
static const int widths[] = {1, 2, 7, 15, 16, 31, 32, 33, 48, 63, 64, 65, 96, 100, 128, 129, 160, 257, 300};
#define COUNT(list) ((int)(sizeof(list) / sizeof *(list)))
enum { MOST_MATRICES = 3, BLOCK = 32 };

/* Tokens of zeros, blocks of zeros, and very small and very large ones among ordinary ones. */
static float *draw_tokens(int tokens, int cols) {
    float *x = draw_floats(tokens * cols);
    for (int t = 0; t < tokens; t++) {
        float by = (float[]){1, 1, 1, 1, 1, 0, 1e-20f, 1e6f}[draw(8)];
        int from = draw(4) ? cols : BLOCK * draw(cols / BLOCK + 1);
        for (int c = 0; c < cols; c++) x[t * cols + c] *= c >= from && c < from + BLOCK ? 0 : by;
    }
    return x;
}

/* One token after the other: the same bits. */
static void run_alone(const engine *on, const moert_matrix *matrix, const float *x, int tokens, const float *expected) {
    float *y = claim((size_t)matrix->rows * sizeof *y);
    for (int t = 0; t < tokens; t++) {
        fill(y, matrix->rows);
        require(on, !moert_linear(on->pool, 1, &matrix, x + t * matrix->cols, 1, &y), "no memory");
        again(on, "output of one token", y, expected + t * matrix->rows, matrix->rows);
    }
    free(y);
}

static void run_linear(const engine *on, int count, const moert_matrix *const *matrices, const float *x, int tokens,
                       float *const *outputs, float *const *first, const estimate *expected) {
    for (int m = 0; m < count; m++) fill(outputs[m], tokens * matrices[m]->rows);
    require(on, !moert_linear(on->pool, count, matrices, x, tokens, outputs), "no memory");
    for (int m = 0; m < count; m++) {
        const char *what = m ? "later output" : "output";
        check(on, what, outputs[m], &expected[m], tokens * matrices[m]->rows);
        agree(on, what, outputs[m], first[m], tokens * matrices[m]->rows, EVERYWHERE);
        if (tokens < 20) run_alone(on, matrices[m], x, tokens, outputs[m]);
    }
}

static void linear(int kind, int rows, int cols, int group, int style, int tokens, int count) {
    problem_matrix made[MOST_MATRICES];
    const moert_matrix *matrices[MOST_MATRICES];
    float *outputs[MOST_MATRICES], *first[MOST_MATRICES];
    estimate expected[MOST_MATRICES];
    float *x = draw_tokens(tokens, cols);
    describe("linear: kind %d, %d rows, %d cols, group %d, style %d, %d tokens, %d matrices", kind, rows, cols, group,
             style, tokens, count);
    for (int m = 0; m < count; m++) {
        int height = m ? 1 + draw(40) : rows;
        made[m] = matrix_make(m ? kinds[draw(COUNT(kinds))] : kind, height, cols, group, style);
        matrices[m] = &made[m].matrix;
        outputs[m] = claim((size_t)tokens * height * sizeof(float));
        first[m] = claim((size_t)tokens * height * sizeof(float));
        expected[m] = estimate_make(tokens * height);
        for (int t = 0; t < tokens; t++) {
            estimate token = estimate_of(x + t * cols, cols);
            estimate y = estimate_at(&expected[m], t * height);
            plain_multiply(&made[m], &token, FINAL, &y);
            estimate_free(&token);
        }
    }
    for (int e = 0; e < engine_count; e++)
        run_linear(&engines[e], count, matrices, x, tokens, outputs, first, expected);
    for (int m = 0; m < count; m++) {
        matrix_free(&made[m]);
        free(outputs[m]), free(first[m]);
        estimate_free(&expected[m]);
    }
    free(x);
}

/* Numbers so small that 127 / largest is infinite: the result is finite and not larger than it may be. */
static void tiny(int kind) {
    enum { ROWS = 5, COLS = 70 };
    float *x = draw_floats(COLS), y[ROWS];
    problem_matrix made = matrix_make(kind, ROWS, COLS, 32, PLAIN);
    const moert_matrix *matrix = &made.matrix;
    float *output = y;
    estimate bound = {(double[ROWS]){0}, (double[ROWS]){0}};
    const float *bias = matrix->bias;
    describe("tiny numbers: kind %d", kind);
    for (int c = 0; c < COLS; c++) x[c] *= c < 40 ? 1e-42f : 1e-38f;
    for (int r = 0; bias && r < ROWS; r++) bound.value[r] = bias[r], bound.error[r] = 1e-7 * fabs(bias[r]);
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLS; c++) bound.error[r] += made.magnitude[r * COLS + c] * 3e-38;
    for (int e = 0; e < engine_count; e++) {
        fill(y, ROWS);
        moert_linear(engines[e].pool, 1, &matrix, x, 1, &output);
        check(&engines[e], "output", y, &bound, ROWS);
    }
    matrix_free(&made);
    free(x);
}

void linear_cases(void) {
    static const int token_counts[] = {1, 2, 5, 17};
    int number = 0;
    for (int w = 0; w < COUNT(widths); w++)
        for (int k = 0; k < COUNT(kinds); k++)
            for (int g = 0; g < (kinds[k] <= 8 && kinds[k] > 0 ? COUNT(groups) : 1); g++, number++) {
                seed((uint64_t)number);
                int rows = number % 5 ? 1 + draw(67) : 1 + draw(3), tokens = token_counts[draw(4)];
                linear(kinds[k], rows, widths[w], groups[g], number % 4 == 3 ? EXTREME : PLAIN,
                       tokens, 1 + draw(MOST_MATRICES));
            }
    for (int k = 0; k < COUNT(kinds); k++) {
        seed(9000 + (uint64_t)k);
        tiny(kinds[k]);
        linear(kinds[k], 67, 96, 64, PLAIN, 200, 1);
        linear(kinds[k], 9, 33, 0, EXTREME, 200, 2);
        linear(kinds[k], 66, 2048, 128, PLAIN, 1, 1);
        for (int tokens = 2; tokens < 10; tokens++) linear(kinds[k], 131, tokens % 2 ? 160 : 307, groups[tokens % 5], PLAIN, tokens, 1);
        linear(kinds[k], 40, 1100, 32, EXTREME, 27, 1); /* several vectors of groups, and more tokens than are taken at once */
        linear(kinds[k], 3, 2048, 0, PLAIN, 17, 1);
        linear(kinds[k], 300, 128, 0, PLAIN, 1 + 16 * (k % 2), 1);
        for (int g = 0; g < COUNT(groups); g++) {
            int rows = 1 + draw(70), tokens = 1 + draw(40);
            linear(kinds[k], rows, 576 + 64 * draw(3), groups[g], PLAIN, tokens, 2);
        }
    }
}

static void one_rows(int kind, int cols, int group, int style) {
    int height = 1 + draw(30), count = 1 + draw(20), length = count * cols;
    problem_matrix made = matrix_make(kind, height, cols, group, style);
    int64_t *rows = claim((size_t)count * sizeof *rows);
    float *out = claim((size_t)length * sizeof *out), *first = claim((size_t)length * sizeof *first);
    estimate expected = estimate_make(length);
    describe("rows: kind %d, %d of %d rows, %d cols, group %d, style %d", kind, count, height, cols, group, style);
    for (int i = 0; i < count; i++) {
        rows[i] = draw(height);
        for (int c = 0; c < cols; c++) {
            expected.value[i * cols + c] = made.weight[rows[i] * cols + c];
            expected.error[i * cols + c] = kind <= 8 ? 2e-7 * made.magnitude[rows[i] * cols + c] : 0;
        }
    }
    for (int e = 0; e < engine_count; e++) {
        fill(out, length);
        require(&engines[e], !moert_rows(engines[e].pool, &made.matrix, count, rows, out), "no memory");
        check(&engines[e], "row", out, &expected, length);
        agree(&engines[e], "row", out, first, length, EVERYWHERE);
    }
    matrix_free(&made);
    estimate_free(&expected);
    free(rows), free(out), free(first);
}

void rows_cases(void) {
    for (int number = 0; number < 100; number++) {
        seed(3000 + (uint64_t)number);
        int cols = widths[draw(COUNT(widths))];
        one_rows(kinds[number % 8], cols, groups[draw(COUNT(groups))], number % 4 == 3 ? EXTREME : PLAIN);
    }
    seed(3900);
    one_rows(4, 20000, 64, PLAIN);
}
