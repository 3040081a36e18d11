/* moert_scores: the norm and the probabilities of all experts; moert_choose: the likeliest with their weights. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"

enum { MOST_CHOSEN = 8 };

/* The softmax of router · hidden. */
static void probabilities_of(const problem_matrix *router, const float *hidden, estimate *p) {
    int count = router->matrix.rows;
    double largest = -INFINITY, total = 0, doubt = 0;
    estimate x = estimate_of(hidden, router->matrix.cols);
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

typedef struct {
    problem_matrix router;
    int tokens;
    float *norm, *x;
    float *hidden, *found;             /* what an engine finds: hidden states and probabilities */
    float *first_hidden, *first_found; /* what the first one found */
    estimate normed;
} scores;

static void run_scores(scores *s, const engine *on) {
    const moert_matrix *router = &s->router.matrix;
    int count = router->rows, cols = router->cols;
    estimate p = estimate_make(count);
    fill(s->hidden, s->tokens * cols), fill(s->found, s->tokens * count);
    require(on, !moert_scores(on->pool, s->norm, 1e-5f, router, s->tokens, s->x, s->hidden, s->found), "no memory");
    check(on, "hidden", s->hidden, &s->normed, s->tokens * cols);
    for (int t = 0; t < s->tokens; t++) { /* of the hidden state as it came out: rounded alike */
        probabilities_of(&s->router, s->hidden + t * cols, &p);
        check(on, "probabilities", s->found + t * count, &p, count);
    }
    agree(on, "hidden", s->hidden, s->first_hidden, s->tokens * cols, EVERYWHERE);
    agree(on, "probabilities", s->found, s->first_found, s->tokens * count, HERE);
    for (int t = 0; t < s->tokens; t++) {
        fill(s->hidden, cols), fill(s->found, count);
        int failed = moert_scores(on->pool, s->norm, 1e-5f, router, 1, s->x + t * cols, s->hidden, s->found);
        require(on, !failed, "no memory");
        again(on, "hidden of one token", s->hidden, s->first_hidden + t * cols, cols);
        again(on, "probabilities of one token", s->found, s->first_found + t * count, count);
    }
    estimate_free(&p);
}

static void one_scores(int number) {
    static const int kinds[] = {MOERT_F32, MOERT_F16, MOERT_BF16, 8};
    int count = number % 10 ? 1 + draw(70) : 1, cols = (int[]){1, 16, 33, 64, 100, 256}[draw(6)];
    scores s = {.tokens = (int[]){1, 2, 7, 40}[draw(4)]};
    s.router = matrix_make(kinds[number % 4], count, cols, 0, PLAIN);
    size_t hidden_bytes = (size_t)(s.tokens * cols) * sizeof(float), bytes = (size_t)(s.tokens * count) * sizeof(float);
    s.norm = draw_floats(cols), s.x = draw_floats(s.tokens * cols);
    s.hidden = claim(hidden_bytes), s.first_hidden = claim(hidden_bytes);
    s.found = claim(bytes), s.first_found = claim(bytes);
    s.normed = estimate_make(s.tokens * cols);
    estimate input = estimate_of(s.x, s.tokens * cols);
    describe("scores: kind %d, %d experts, %d cols, %d tokens", s.router.matrix.kind, count, cols, s.tokens);
    for (int t = 0; t < s.tokens; t++) {
        estimate token = estimate_at(&input, t * cols), normed = estimate_at(&s.normed, t * cols);
        plain_norm(&token, s.norm, 1e-5f, 1, cols, &normed);
    }
    for (int e = 0; e < engine_count; e++) run_scores(&s, &engines[e]);
    matrix_free(&s.router);
    estimate_free(&input), estimate_free(&s.normed);
    free(s.norm), free(s.x), free(s.hidden), free(s.found), free(s.first_hidden), free(s.first_found);
}

void scores_cases(void) {
    for (int number = 0; number < 80; number++) {
        seed(7000 + (uint64_t)number);
        one_scores(number);
    }
}

/* An expert is chosen if fewer than top_k come before it: the likelier ones, and of equal ones the earlier. */
static int choose_plainly(const float *p, int count, int top_k, int64_t *chosen, double *weights) {
    int found = 0;
    for (int i = 0; i < count; i++) {
        int before = 0;
        for (int other = 0; other < count; other++) before += p[other] > p[i] || (p[other] == p[i] && other < i);
        if (before < top_k) chosen[found] = i, weights[found++] = p[i];
    }
    return found;
}

static void check_choice(const float *p, int count, int top_k, int renormalise, const int64_t *chosen,
                         const float *weights) {
    int64_t experts[MOST_CHOSEN];
    double value[MOST_CHOSEN], error[MOST_CHOSEN], sum = 0;
    estimate expected = {value, error};
    int found = choose_plainly(p, count, top_k, experts, value);
    require(engines, found == top_k && !memcmp(chosen, experts, (size_t)top_k * sizeof *chosen), "other experts");
    for (int i = 0; i < top_k; i++) sum += value[i];
    for (int i = 0; i < top_k; i++) {
        if (renormalise) value[i] /= sum;
        error[i] = renormalise ? INNER * value[i] : 0;
    }
    check(engines, "weights", weights, &expected, top_k);
}

/* No engine has a part in it. `steps`: how many different probabilities there are, so that some are equal. */
static void one_choose(int count, int top_k, int renormalise, int tokens, int steps) {
    size_t bytes = (size_t)(tokens * count) * sizeof(float);
    float *p = claim(bytes), *spoilt = claim(bytes), *weights = claim((size_t)(tokens * top_k) * sizeof *weights);
    int64_t *chosen = claim((size_t)(tokens * top_k) * sizeof *chosen);
    describe("choose: %d of %d, renormalise %d, %d tokens, %d steps", top_k, count, renormalise, tokens, steps);
    for (int i = 0; i < tokens * count; i++) p[i] = (float)draw(steps) / (float)steps;
    for (int t = 0; t < tokens; t++) p[t * count + draw(count)] = 0.9f; /* a sum of 0 does not happen */
    memcpy(spoilt, p, bytes);
    fill(weights, tokens * top_k);
    moert_choose(spoilt, tokens, count, top_k, renormalise, chosen, weights);
    for (int t = 0; t < tokens; t++)
        check_choice(p + t * count, count, top_k, renormalise, chosen + t * top_k, weights + t * top_k);
    free(p), free(spoilt), free(weights), free(chosen);
}

void choose_cases(void) {
    for (int number = 0; number < 120; number++) {
        seed(7500 + (uint64_t)number);
        int count = number % 10 ? 1 + draw(70) : 1, least = count < MOST_CHOSEN ? count : MOST_CHOSEN;
        int top_k = number % 4 ? 1 + draw(least) : least, renormalise = draw(2), tokens = 1 + draw(9);
        one_choose(count, top_k, renormalise, tokens, (int[]){2, 5, 1 << 20}[draw(3)]);
    }
}
