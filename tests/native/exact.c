/* Problems whose every intermediate result is a whole number below 2^24: the results are equal, bit by bit, on all
 * instruction sets and machines. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"

static const int kinds[] = {2, 3, 4, MOERT_MXFP4, 8}, groups[] = {0, 16, 32, 64, 10};

/* Each block's largest is 127, so that rounding leaves all as they are. */
enum { LEAST_BLOCK = 16 };

static float *draw_whole(int length, int cols, int least) {
    float *x = claim((size_t)length * sizeof *x);
    for (int i = 0; i < length; i++) x[i] = i % cols % LEAST_BLOCK ? (float)(least + draw(128 - least)) : 127;
    return x;
}

/* Adds the expected numbers to the expected hash; afterwards each engine's are compared and added to its own. */
static void expect(const estimate *numbers, int length) {
    for (int i = 0; i < length; i++) {
        float number = (float)numbers->value[i];
        numbers->error[i] = 0;
        hash(NULL, &number, 1);
    }
}

static void exact_linear(int kind, int rows, int cols, int group, int tokens) {
    problem_matrix made = matrix_make(kind, rows, cols, group, UNIT);
    const moert_matrix *matrix = &made.matrix;
    float *x = draw_whole(tokens * cols, cols, -127), *y = claim((size_t)tokens * rows * sizeof *y);
    estimate expected = estimate_make(tokens * rows);
    describe("exact linear: kind %d, %d rows, %d cols, group %d, %d tokens", kind, rows, cols, group, tokens);
    for (int t = 0; t < tokens; t++) {
        estimate token = estimate_of(x + t * cols, cols);
        estimate row = {expected.value + t * rows, expected.error + t * rows};
        plain_multiply(&made, &token, 0, &row);
        estimate_free(&token);
    }
    expect(&expected, tokens * rows);
    for (int e = 0; e < engine_count; e++) {
        moert_linear(engines[e].pool, 1, &matrix, x, tokens, &y);
        check(&engines[e], "output", y, &expected, tokens * rows);
        hash(&engines[e], y, tokens * rows);
    }
    matrix_free(&made);
    estimate_free(&expected);
    free(x), free(y);
}

/* Two experts with ReLU whose hidden numbers are some of the inputs. */
static void exact_mixture(int kind, int size, int tokens) {
    problem_matrix up[2], down[2];
    moert_ffn ffn[2];
    const moert_ffn *both[2] = {&ffn[0], &ffn[1]};
    const moert_act act = {MOERT_RELU, INFINITY, 1, 0, INFINITY};
    int32_t starts[3] = {0, tokens, 2 * tokens}, *token_of = claim((size_t)tokens * 2 * sizeof *token_of);
    float *weights = claim((size_t)tokens * 2 * sizeof *weights), *x = draw_whole(tokens * size, size, 0);
    float *out = claim((size_t)tokens * size * sizeof *out);
    estimate expected = estimate_make(tokens * size), y = estimate_make(size);
    describe("exact mixture: kind %d, size %d, %d tokens", kind, size, tokens);
    memset(expected.value, 0, (size_t)tokens * size * sizeof(double));
    for (int e = 0; e < 2; e++) {
        up[e] = matrix_make(kind, size, size, 0, SELECT);
        down[e] = matrix_make(kinds[(e + kind) % 5], size, size, groups[draw(5)], UNIT);
        memset(&ffn[e], 0, sizeof ffn[e]);
        ffn[e].up = up[e].matrix, ffn[e].down = down[e].matrix;
        for (int t = 0; t < tokens; t++) {
            estimate token = estimate_of(x + t * size, size);
            weights[e * tokens + t] = e ? 0.5f : 2, token_of[e * tokens + t] = t;
            plain_multiply(&down[e], &token, 0, &y);
            for (int i = 0; i < size; i++) expected.value[t * size + i] += weights[e * tokens + t] * y.value[i];
            estimate_free(&token);
        }
    }
    expect(&expected, tokens * size);
    for (int e = 0; e < engine_count; e++) {
        memset(out, 0, (size_t)tokens * size * sizeof *out);
        moert_mixture(engines[e].pool, &act, 2, both, starts, token_of, weights, x, tokens, out);
        check(&engines[e], "output", out, &expected, tokens * size);
        hash(&engines[e], out, tokens * size);
    }
    for (int e = 0; e < 2; e++) matrix_free(&up[e]), matrix_free(&down[e]);
    estimate_free(&expected), estimate_free(&y);
    free(token_of), free(weights), free(x), free(out);
}

void exact_cases(void) {
    static const int widths[] = {1, 31, 32, 33, 64, 96, 100, 160, 576, 610};
    for (int w = 0; w < 10; w++)
        for (int k = 0; k < 5; k++) {
            for (int g = 0; g < 5; g++) {
                seed(8000 + (uint64_t)(w * 100 + k * 10 + g));
                exact_linear(kinds[k], 1 + draw(67), widths[w], groups[g], g % 2 ? 1 : 5);
            }
            seed(9000 + (uint64_t)(w * 10 + k));
            if (widths[w] <= 160) exact_mixture(kinds[k], widths[w], w % 2 ? 1 : 7); /* below 2^24 */
        }
}
