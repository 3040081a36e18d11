/* moert_softplus, moert_sigmoid, moert_balance, moert_gated, and what mixers with a state do with numbers that are none. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"

static const int widths[] = {1, 3, 8, 15, 16, 17, 33, 64, 100, 257, 1000, 4100};

/* Numbers of all sizes, the ends of what e^x holds among them. */
static float *draw_wide(int length) {
    static const float ends[] = {0, 20, -20, 87, -87, 87.5f, -87.5f, 88.5f, -88.5f, 1e-8f, -1e-8f, 1e30f, -1e30f};
    float *x = draw_floats(length);
    for (int i = 0; i < length; i++) x[i] = draw(8) ? x[i] * (float)PICK(1, 1, 5, 20, 60) : ends[draw(13)];
    return x;
}

static void one_softplus(int n, int rows) {
    int length = rows * n;
    float *x = draw_wide(length), *bias = draw_floats(n);
    float *y = claim((size_t)length * sizeof *y), *first = claim((size_t)length * sizeof *first);
    estimate expected = estimate_make(length);
    describe("softplus: %d rows of %d", rows, n);
    for (int i = 0; i < length; i++) {
        double at = (double)(x[i] + bias[i % n]);
        expected.value[i] = fmax(at, 0) + log1p(exp(-fabs(at))), expected.error[i] = 5e-7 * expected.value[i];
    }
    for (int e = 0; e < engine_count; e++) {
        fill(y, length);
        moert_softplus(engines[e].pool, rows, n, x, bias, y);
        check(&engines[e], "output", y, &expected, length);
        agree(&engines[e], "output", y, first, length, EVERYWHERE);
        fill(y, length);
        for (int at = 0; at < length; at += n) moert_softplus(engines[e].pool, 1, n, x + at, bias, y + at);
        again(&engines[e], "output of one row", y, first, length);
    }
    estimate_free(&expected);
    free(x), free(bias), free(y), free(first);
}

static void one_sigmoid(int length) {
    float *x = draw_wide(length), *y = claim((size_t)length * sizeof *y), *first = claim((size_t)length * sizeof *first);
    estimate expected = estimate_make(length);
    describe("sigmoid: %d numbers", length);
    for (int i = 0; i < length; i++) {
        expected.value[i] = 1 / (1 + exp(-x[i]));
        expected.error[i] = INNER * expected.value[i] + 1e-37; /* float32 ends there */
    }
    for (int e = 0; e < engine_count; e++) {
        fill(y, length);
        moert_sigmoid(engines[e].pool, length, x, y);
        check(&engines[e], "output", y, &expected, length);
        agree(&engines[e], "output", y, first, length, EVERYWHERE);
    }
    estimate_free(&expected);
    free(x), free(y), free(first);
}

static void one_balance(int n, int rounds, int tokens) {
    static const float floor = 1e-3f;
    const int length = tokens * n * n;
    float *x = draw_floats(length), *y = claim((size_t)length * sizeof *y), *first = claim((size_t)length * sizeof *first);
    double *plain = claim((size_t)length * sizeof *plain);
    estimate expected = estimate_make(length);
    describe("balance: %d matrices of %d rows, %d rounds", tokens, n, rounds);
    for (int i = 0; i < length; i++) x[i] = fabsf(x[i]) + floor, plain[i] = x[i];
    for (int token = 0; token < tokens; token++)
        for (int step = 0; step < 2 * rounds - 1; step++)
            for (int one = 0; one < n; one++) {
                double *from = plain + token * n * n + one * (step % 2 ? n : 1), sum = (double)floor;
                const int apart = step % 2 ? 1 : n;
                for (int i = 0; i < n; i++) sum += from[i * apart];
                for (int i = 0; i < n; i++) from[i * apart] /= sum;
            }
    for (int i = 0; i < length; i++) expected.value[i] = plain[i], expected.error[i] = 2e-7 * (n + 2) * rounds * plain[i];
    for (int e = 0; e < engine_count; e++) {
        memcpy(y, x, (size_t)length * sizeof *y);
        moert_balance(engines[e].pool, tokens, n, rounds, floor, y);
        check(&engines[e], "output", y, &expected, length);
        agree(&engines[e], "output", y, first, length, EVERYWHERE);
        memcpy(y, x, (size_t)length * sizeof *y);
        for (int token = 0; token < tokens; token++)
            moert_balance(engines[e].pool, 1, n, rounds, floor, y + token * n * n);
        again(&engines[e], "output of one token", y, first, length);
    }
    estimate_free(&expected);
    free(x), free(y), free(first), free(plain);
}

static void plain_gated(const moert_norm *norm, int groups, int last, int n, const float *x, const float *gate, estimate *y) {
    static const moert_act silu = {MOERT_SILU, INFINITY, 1, 0, INFINITY};
    int size = n / groups;
    estimate with = estimate_make(n), made = estimate_make(n);
    for (int i = 0; i < n; i++) with.value[i] = gate[i], made.value[i] = x[i], with.error[i] = made.error[i] = 0;
    for (int step = 0; step < 2; step++) {
        if (step != last) plain_activate(&silu, &with, &made, n, &made);
        for (int at = 0; at < n && norm && step == last; at += size) {
            moert_norm of = {norm->weight + at, NULL, norm->eps};
            estimate part = estimate_at(&made, at);
            plain_norm(&part, &of, 1, size, &part);
        }
    }
    memcpy(y->value, made.value, (size_t)n * sizeof(double)), memcpy(y->error, made.error, (size_t)n * sizeof(double));
    estimate_free(&with), estimate_free(&made);
}

static void one_gated(int number) {
    int groups = PICK(1, 1, 2, 5), n = groups * widths[number % 12], rows = PICK(1, 2, 5, 40), length = rows * n;
    int last = draw(2);
    float *x = draw_floats(length), *gate = draw_floats(length), *weight = draw_floats(n);
    float *y = claim((size_t)length * sizeof *y), *first = claim((size_t)length * sizeof *first);
    moert_norm made = {weight, NULL, 1e-3f}, *norm = draw(4) ? &made : NULL;
    estimate expected = estimate_make(length);
    describe("gated: %d rows of %d, norm %d of %d groups, last %d", rows, n, norm != NULL, groups, last);
    for (int at = 0; at < length; at += n) {
        estimate row = estimate_at(&expected, at);
        plain_gated(norm, groups, last, n, x + at, gate + at, &row);
    }
    for (int e = 0; e < engine_count; e++) {
        fill(y, length);
        moert_gated(engines[e].pool, norm, groups, last, rows, n, x, gate, y);
        check(&engines[e], "output", y, &expected, length);
        agree(&engines[e], "output", y, first, length, EVERYWHERE);
        fill(y, length);
        for (int at = 0; at < length; at += n)
            moert_gated(engines[e].pool, norm, groups, last, 1, n, x + at, gate + at, y + at);
        again(&engines[e], "output of one row", y, first, length);
    }
    estimate_free(&expected);
    free(x), free(gate), free(weight), free(y), free(first);
}

/* Numbers that are none, or too large, in one of two heads: every call returns, and the other head is what it is without. */
static void wild(float with) {
    enum { SIZE = 20, HEADS = 2 };
    float tame[HEADS * SIZE], steps[HEADS] = {0.5f, 0.25f}, all[HEADS] = {-0.5f, -0.25f};
    float found[HEADS * SIZE], expected[HEADS * SIZE], states[2][HEADS * SIZE * SIZE], input[HEADS * SIZE];
    for (int i = 0; i < HEADS * SIZE; i++) tame[i] = draw_float();
    memcpy(input, tame, sizeof input);
    for (int i = 0; i < SIZE; i += 3) input[i] = with;
    float wrong[HEADS] = {with, steps[1]}, wrong_too[HEADS] = {with, all[1]};
    describe("numbers like %g", with);
    for (int e = 0; e < engine_count; e++)
        for (int kind = 0; kind < 2; kind++) {
            memset(states, 0, sizeof states);
            for (int is_wild = 0; is_wild < 2; is_wild++) {
                const float *x = is_wild ? input : tame, *a = is_wild ? wrong_too : all, *dt = is_wild ? wrong : steps;
                float *state = states[is_wild], *y = is_wild ? found : expected;
                const moert_delta d = {x, x, x, a, dt, state, y, 1, HEADS, HEADS, SIZE, SIZE, 1};
                const moert_scan s = {x, dt, a, x, x, steps, state, y, 1, HEADS, HEADS, SIZE, SIZE, 1};
                int failed = kind ? moert_delta_rule(engines[e].pool, &d) : moert_scan_tokens(engines[e].pool, &s);
                require(&engines[e], !failed, "no memory");
            }
            again(&engines[e], "output of the other head", found + SIZE, expected + SIZE, SIZE);
            again(&engines[e], "state of the other head", states[1] + SIZE * SIZE, states[0] + SIZE * SIZE, SIZE * SIZE);
            moert_softplus(engines[e].pool, 1, HEADS * SIZE, input, tame, found);
            moert_softplus(engines[e].pool, 1, HEADS * SIZE, tame, tame, expected);
            again(&engines[e], "softplus of the others", found + SIZE, expected + SIZE, SIZE);
        }
}

void softplus_cases(void) {
    for (int number = 0; number < 36; number++) {
        seed(10300 + (uint64_t)number);
        one_softplus(widths[number % 12], 1 + number / 12 * 20);
        one_sigmoid(widths[number % 12] * (1 + number / 12));
    }
}

void balance_cases(void) {
    static const int sizes[] = {2, 3, 4, 5, 8, 17, 64};
    for (int number = 0; number < 28; number++) {
        seed(10450 + (uint64_t)number);
        one_balance(sizes[number % 7], PICK(4, 1, 2, 5, 20), 1 + number / 7 * 40);
    }
}

void gated_cases(void) {
    for (int number = 0; number < 72; number += apart) {
        seed(10400 + (uint64_t)number);
        one_gated(number);
    }
}

void wild_cases(void) {
    static const float numbers[] = {NAN, INFINITY, -INFINITY, 3e38f, -3e38f};
    for (int number = 0; number < 5; number++) {
        seed(10500 + (uint64_t)number);
        wild(numbers[number]);
    }
}
