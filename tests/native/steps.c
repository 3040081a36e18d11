/* moert_norm and moert_head. */
#include <stdlib.h>

#include "driver.h"

static const int kinds[] = {2, 3, 4, 8, MOERT_F16, MOERT_BF16, MOERT_F32};
static const int groups[] = {0, 16, 32, 64, 128, 10, 48};
static const int token_counts[] = {1, 2, 5, 17, 70};

/* Like a hidden state: some tokens are much larger or smaller than others. */
static float *draw_states(int tokens, int cols) {
    float *x = draw_floats(tokens * cols);
    for (int t = 0; t < tokens; t++) {
        float by = (float[]){1, 1, 1, 0, 1e-3f, 1e4f}[draw(6)];
        for (int c = 0; c < cols; c++) x[t * cols + c] *= by;
    }
    return x;
}

static void one_norm(int cols, int tokens, float eps) {
    int length = tokens * cols;
    float *weight = draw_floats(cols), *x = draw_states(tokens, cols), *y = claim((size_t)length * sizeof *y);
    float *first = claim((size_t)length * sizeof *first);
    estimate expected = estimate_make(length), input = estimate_of(x, length);
    describe("norm: %d numbers, %d tokens, eps %g", cols, tokens, eps);
    for (int at = 0; at < length; at += cols) {
        estimate token = estimate_at(&input, at), found = estimate_at(&expected, at);
        plain_norm(&token, weight, eps, 1, cols, &found);
    }
    for (int e = 0; e < engine_count; e++) {
        fill(y, length);
        moert_norm(engines[e].pool, weight, eps, tokens, cols, x, y);
        check(&engines[e], "output", y, &expected, length);
        agree(&engines[e], "output", y, first, length, EVERYWHERE);
        fill(y, length);
        for (int at = 0; at < length; at += cols) moert_norm(engines[e].pool, weight, eps, 1, cols, x + at, y + at);
        again(&engines[e], "output of one token", y, first, length);
    }
    estimate_free(&expected), estimate_free(&input);
    free(weight), free(x), free(y), free(first);
}

void norm_cases(void) {
    static const int widths[] = {1, 3, 4, 8, 15, 16, 31, 32, 33, 63, 64, 65, 100, 257, 1000};
    for (int number = 0; number < 75; number++) {
        seed(4500 + (uint64_t)number);
        one_norm(widths[number % 15], token_counts[number / 15], number % 2 ? 1e-5f : 1e-6f);
    }
}

static void run_head(const engine *on, const float *norm, float factor, const moert_matrix *matrix, int tokens,
                     const float *x, const estimate *expected, float *first) {
    int length = tokens * matrix->rows;
    float *y = claim((size_t)length * sizeof *y);
    fill(y, length);
    require(on, !moert_head(on->pool, norm, 1e-5f, factor, matrix, tokens, x, y), "no memory");
    check(on, "output", y, expected, length);
    agree(on, "output", y, first, length, EVERYWHERE);
    for (int t = 0; t < tokens; t++) {
        fill(y, matrix->rows);
        require(on, !moert_head(on->pool, norm, 1e-5f, factor, matrix, 1, x + t * matrix->cols, y), "no memory");
        again(on, "output of one token", y, first + t * matrix->rows, matrix->rows);
    }
    free(y);
}

static void one_head(int number) {
    int cols = number % 3 ? 32 * (1 + draw(6)) : 1 + draw(200), rows = 1 + draw(90), tokens = token_counts[number % 5];
    float factor = number % 2 ? 1 : 0.125f;
    problem_matrix made = matrix_make(kinds[number % 7], rows, cols, groups[draw(7)], PLAIN);
    float *norm = draw_floats(cols), *x = draw_states(tokens, cols), *first = claim((size_t)tokens * rows * sizeof *first);
    estimate expected = estimate_make(tokens * rows), input = estimate_of(x, tokens * cols), hidden = estimate_make(cols);
    describe("head: kind %d, %d rows, %d cols, %d tokens", made.matrix.kind, rows, cols, tokens);
    for (int t = 0; t < tokens; t++) {
        estimate token = estimate_at(&input, t * cols), y = estimate_at(&expected, t * rows);
        plain_norm(&token, norm, 1e-5f, factor, cols, &hidden);
        plain_multiply(&made, &hidden, FINAL, &y);
    }
    for (int e = 0; e < engine_count; e++)
        run_head(&engines[e], norm, factor, &made.matrix, tokens, x, &expected, first);
    matrix_free(&made);
    estimate_free(&expected), estimate_free(&input), estimate_free(&hidden);
    free(norm), free(x), free(first);
}

void head_cases(void) {
    for (int number = 0; number < 70; number++) {
        seed(5000 + (uint64_t)number);
        one_head(number);
    }
}
