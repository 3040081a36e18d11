/* moert_linear: every kind and group at odd shapes; moert_head. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"

static const int kinds[] = {2, 3, 4, 8, MOERT_F16, MOERT_BF16, MOERT_F32};
static const int groups[] = {0, 16, 32, 64, 128, 10, 48};
static const int widths[] = {1, 2, 7, 15, 16, 31, 32, 33, 48, 63, 64, 65, 96, 100, 128, 129, 160, 257, 300};
#define COUNT(list) ((int)(sizeof(list) / sizeof *(list)))
enum { MOST_MATRICES = 3 };

/* Tokens of zeros, blocks of zeros, and very small and very large ones among ordinary ones. */
static float *draw_tokens(int tokens, int cols) {
    float *x = draw_floats(tokens * cols);
    for (int t = 0; t < tokens; t++) {
        float by = (float[]){1, 1, 1, 1, 1, 0, 1e-20f, 1e6f}[draw(8)];
        int from = draw(4) ? cols : MOERT_BLOCK * draw(cols / MOERT_BLOCK + 1);
        for (int c = 0; c < cols; c++) x[t * cols + c] *= c >= from && c < from + MOERT_BLOCK ? 0 : by;
    }
    return x;
}

static void fill(float *numbers, int length) {
    for (int i = 0; i < length; i++) numbers[i] = NAN; /* all must be written */
}

static void linear(int kind, int rows, int cols, int group, int style, int tokens, int count) {
    problem_matrix made[MOST_MATRICES];
    const moert_matrix *matrices[MOST_MATRICES];
    float *outputs[MOST_MATRICES];
    estimate expected[MOST_MATRICES];
    float *x = draw_tokens(tokens, cols);
    describe("linear: kind %d, %d rows, %d cols, group %d, style %d, %d tokens, %d matrices", kind, rows, cols, group,
             style, tokens, count);
    for (int m = 0; m < count; m++) {
        int height = m ? 1 + draw(40) : rows;
        made[m] = matrix_make(m ? kinds[draw(COUNT(kinds))] : kind, height, cols, group, style);
        matrices[m] = &made[m].matrix;
        outputs[m] = claim((size_t)tokens * height * sizeof(float));
        expected[m] = estimate_make(tokens * height);
        for (int t = 0; t < tokens; t++) {
            estimate token = estimate_of(x + t * cols, cols);
            estimate y = {expected[m].value + t * height, expected[m].error + t * height};
            plain_multiply(&made[m], &token, FINAL, &y);
            estimate_free(&token);
        }
    }
    for (int e = 0; e < engine_count; e++) {
        for (int m = 0; m < count; m++) fill(outputs[m], tokens * made[m].matrix.rows);
        int failed = moert_linear(engines[e].pool, count, matrices, x, tokens, outputs);
        require(&engines[e], !failed, "no memory");
        for (int m = 0; m < count; m++)
            check(&engines[e], m ? "later output" : "output", outputs[m], &expected[m], tokens * made[m].matrix.rows);
    }
    for (int m = 0; m < count; m++) {
        matrix_free(&made[m]);
        free(outputs[m]);
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
    describe("tiny numbers: kind %d", kind);
    for (int c = 0; c < COLS; c++) x[c] *= c < 40 ? 1e-42f : 1e-38f;
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
            for (int g = 0; g < (kinds[k] <= 8 ? COUNT(groups) : 1); g++, number++) {
                seed((uint64_t)number);
                int rows = number % 5 ? 1 + draw(67) : 1 + draw(3);
                linear(kinds[k], rows, widths[w], groups[g], number % 4 == 3 ? EXTREME : PLAIN,
                       token_counts[draw(4)], 1 + draw(MOST_MATRICES));
            }
    for (int k = 0; k < COUNT(kinds); k++) {
        seed(9000 + (uint64_t)k);
        tiny(kinds[k]);
        linear(kinds[k], 67, 96, 64, PLAIN, 200, 1);
        linear(kinds[k], 9, 33, 0, EXTREME, 200, 2);
        linear(kinds[k], 66, 2048, 128, PLAIN, 1, 1);
        linear(kinds[k], 3, 2048, 0, PLAIN, 17, 1);
    }
}

void head_cases(void) {
    for (int number = 0; number < 40; number++) {
        seed(5000 + (uint64_t)number);
        int cols = number % 3 ? 32 * (1 + draw(6)) : 1 + draw(200), rows = 1 + draw(90);
        float factor = number % 2 ? 1 : 0.125f, eps = 1e-5f;
        problem_matrix made = matrix_make(kinds[number % COUNT(kinds)], rows, cols, groups[draw(7)], PLAIN);
        float *norm = draw_floats(cols), *x = draw_floats(cols), *y = claim((size_t)rows * sizeof *y);
        estimate input = estimate_of(x, cols), hidden = estimate_make(cols), expected = estimate_make(rows);
        describe("head: kind %d, %d rows, %d cols", made.matrix.kind, rows, cols);
        plain_norm(&input, norm, eps, factor, cols, &hidden);
        plain_multiply(&made, &hidden, FINAL, &expected);
        for (int e = 0; e < engine_count; e++) {
            fill(y, rows);
            require(&engines[e], !moert_head(engines[e].pool, norm, eps, factor, &made.matrix, x, y), "no memory");
            check(&engines[e], "output", y, &expected, rows);
        }
        matrix_free(&made);
        estimate_free(&input), estimate_free(&hidden), estimate_free(&expected);
        free(norm), free(x), free(y);
    }
}
