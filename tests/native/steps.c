/* moert_normalise and moert_head. */
#include <stdlib.h>
#include <string.h>

#include "driver.h"

static const int kinds[] = {2, 3, 4, MOERT_MXFP4, 8, MOERT_F16, MOERT_BF16, MOERT_F32};
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
    moert_norm norm = norm_make(cols, eps);
    float *x = draw_states(tokens, cols), *y = claim((size_t)length * sizeof *y);
    float *first = claim((size_t)length * sizeof *first);
    estimate expected = estimate_make(length), input = estimate_of(x, length);
    describe("norm: %d numbers, %d tokens, eps %g, bias %d", cols, tokens, eps, norm.bias != NULL);
    for (int at = 0; at < length; at += cols) {
        estimate token = estimate_at(&input, at), found = estimate_at(&expected, at);
        plain_norm(&token, &norm, 1, cols, &found);
    }
    for (int e = 0; e < engine_count; e++) {
        fill(y, length);
        moert_normalise(engines[e].pool, &norm, tokens, cols, x, y);
        check(&engines[e], "output", y, &expected, length);
        agree(&engines[e], "output", y, first, length, EVERYWHERE);
        memcpy(y, x, (size_t)length * sizeof *y); /* in its place */
        for (int at = 0; at < length; at += cols) moert_normalise(engines[e].pool, &norm, 1, cols, y + at, y + at);
        again(&engines[e], "output of one token", y, first, length);
    }
    estimate_free(&expected), estimate_free(&input);
    norm_free(&norm);
    free(x), free(y), free(first);
}

void norm_cases(void) {
    static const int widths[] = {1, 3, 4, 8, 15, 16, 31, 32, 33, 63, 64, 65, 100, 257, 1000};
    for (int number = 0; number < 75; number++) {
        seed(4500 + (uint64_t)number);
        one_norm(widths[number % 15], token_counts[number / 15], number % 2 ? 1e-5f : 1e-6f);
    }
}

/* What comes before the matrix, and after it. */
typedef struct {
    moert_norm norm;
    float factor, softcap;
    problem_matrix made;
    int tokens;
    float *x;
} head;

static void run_head(const engine *on, const head *h, const estimate *expected, float *first) {
    const moert_matrix *matrix = &h->made.matrix;
    int rows = matrix->rows, cols = matrix->cols, length = h->tokens * rows;
    float *y = claim((size_t)length * sizeof *y);
    fill(y, length);
    int failed = moert_head(on->pool, &h->norm, h->factor, h->softcap, matrix, h->tokens, h->x, y);
    require(on, !failed, "no memory");
    check(on, "output", y, expected, length);
    agree(on, "output", y, first, length, h->softcap > 0 ? HERE : EVERYWHERE);
    for (int t = 0; t < h->tokens; t++) {
        fill(y, rows);
        failed = moert_head(on->pool, &h->norm, h->factor, h->softcap, matrix, 1, h->x + t * cols, y);
        require(on, !failed, "no memory");
        again(on, "output of one token", y, first + t * rows, rows);
    }
    free(y);
}

static void one_head(int number) {
    int cols = number % 3 ? 32 * (1 + draw(6)) : 1 + draw(200), rows = 1 + draw(90), tokens = token_counts[number % 5];
    head h = {.factor = number % 2 ? 1 : 0.125f, .softcap = draw(3) ? 0 : 2, .tokens = tokens};
    h.made = matrix_make(kinds[number % 8], rows, cols, groups[draw(7)], PLAIN);
    h.norm = norm_make(cols, 1e-5f), h.x = draw_states(tokens, cols);
    float *first = claim((size_t)tokens * rows * sizeof *first);
    estimate expected = estimate_make(tokens * rows), input = estimate_of(h.x, tokens * cols), hidden = estimate_make(cols);
    describe("head: kind %d, %d rows, %d cols, %d tokens, factor %g, softcap %g, bias %d, bias of the norm %d",
             h.made.matrix.kind, rows, cols, tokens, h.factor, h.softcap, h.made.matrix.bias != NULL, h.norm.bias != NULL);
    for (int t = 0; t < tokens; t++) {
        estimate token = estimate_at(&input, t * cols), y = estimate_at(&expected, t * rows);
        plain_norm(&token, &h.norm, h.factor, cols, &hidden);
        plain_multiply(&h.made, &hidden, FINAL, &y);
        plain_cap(&y, h.softcap, rows);
    }
    for (int e = 0; e < engine_count; e++) run_head(&engines[e], &h, &expected, first);
    matrix_free(&h.made), norm_free(&h.norm);
    estimate_free(&expected), estimate_free(&input), estimate_free(&hidden);
    free(h.x), free(first);
}

void head_cases(void) {
    for (int number = 0; number < 70; number++) {
        seed(5000 + (uint64_t)number);
        one_head(number);
    }
}
