/* moert_route: the norm, and the likeliest experts with their weights. */
#include <math.h>
#include <stdlib.h>

#include "driver.h"

static void probabilities(const problem_matrix *router, const float *hidden, int cols, estimate *p) {
    int count = router->matrix.rows;
    double largest = -INFINITY, total = 0, doubt = 0;
    estimate x = estimate_of(hidden, cols);
    plain_multiply(router, &x, INNER, p);
    for (int i = 0; i < count; i++) {
        largest = fmax(largest, p->value[i]);
        doubt = fmax(doubt, p->error[i] + 2e-7 * fabs(p->value[i]));
    }
    for (int i = 0; i < count; i++) total += p->value[i] = exp(p->value[i] - largest);
    for (int i = 0; i < count; i++) {
        p->value[i] /= total;
        p->error[i] = p->value[i] * (expm1(2 * doubt) + FINAL) + 1e-37; /* float32 ends there */
    }
    estimate_free(&x);
}

static void check_choice(const engine *on, const estimate *p, int count, int top_k, int renormalise,
                         const int64_t *experts, const float *weights) {
    double sum = 0, least = INFINITY, total_error = 0;
    char *chosen = claim((size_t)count);
    estimate expected = estimate_make(top_k);
    for (int i = 0; i < count; i++) chosen[i] = 0;
    for (int i = 0; i < top_k; i++) {
        int valid = experts[i] >= 0 && experts[i] < count && (i == 0 || experts[i] > experts[i - 1]);
        require(on, valid, "experts do not rise or are out of range");
        if (!valid) goto end;
        chosen[experts[i]] = 1;
        expected.value[i] = p->value[experts[i]], expected.error[i] = p->error[experts[i]];
        least = fmin(least, expected.value[i] + expected.error[i]);
        sum += expected.value[i], total_error += expected.error[i];
    }
    for (int i = 0; i < count; i++)
        require(on, chosen[i] || p->value[i] - p->error[i] <= least, "a likelier expert was left out");
    for (int i = 0; renormalise && i < top_k; i++) {
        expected.error[i] = expected.error[i] / sum + expected.value[i] / sum * total_error / sum;
        expected.value[i] /= sum;
    }
    check(on, "weights", weights, &expected, top_k);
end:
    free(chosen);
    estimate_free(&expected);
}

static void one_route(int number) {
    static const int kinds[] = {MOERT_F32, MOERT_F16, MOERT_BF16, 8};
    int count = number % 10 ? 1 + draw(70) : 1, cols = (int[]){1, 16, 33, 64, 100, 256}[draw(6)];
    int top_k = 1 + draw(count < 8 ? count : 8), renormalise = draw(2);
    problem_matrix router = matrix_make(kinds[number % 4], count, cols, 0, PLAIN);
    float *norm = draw_floats(cols), *x = draw_floats(cols), *hidden = claim((size_t)cols * sizeof *hidden);
    float *weights = claim((size_t)top_k * sizeof *weights);
    int64_t *experts = claim((size_t)top_k * sizeof *experts);
    estimate input = estimate_of(x, cols), normed = estimate_make(cols), p = estimate_make(count);
    describe("route: kind %d, %d experts, %d cols, top %d, renormalise %d", router.matrix.kind, count, cols, top_k,
             renormalise);
    plain_norm(&input, norm, 1e-5f, 1, cols, &normed);
    for (int e = 0; e < engine_count; e++) {
        for (int i = 0; i < cols; i++) hidden[i] = NAN;
        int failed = moert_route(engines[e].pool, norm, 1e-5f, &router.matrix, x, top_k, renormalise, hidden, experts,
                                 weights);
        require(&engines[e], !failed, "no memory");
        check(&engines[e], "hidden", hidden, &normed, cols);
        probabilities(&router, hidden, cols, &p); /* of the hidden state as it came out: rounded alike */
        check_choice(&engines[e], &p, count, top_k, renormalise, experts, weights);
    }
    matrix_free(&router);
    estimate_free(&input), estimate_free(&normed), estimate_free(&p);
    free(norm), free(x), free(hidden), free(weights), free(experts);
}

void route_cases(void) {
    for (int number = 0; number < 80; number++) {
        seed(7000 + (uint64_t)number);
        one_route(number);
    }
}
