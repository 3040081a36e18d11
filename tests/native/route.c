/* moert_scores: the norm and the scores of all experts; moert_choose: the best with their weights; moert_prefer: those that
 * were used lately before others; moert_gate. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"

enum { MOST_CHOSEN = 8 };
static const int kinds[] = {MOERT_F32, MOERT_F16, MOERT_BF16, 8};

/* The softmax of numbers known up to an error. */
static void softmax(int count, estimate *p) {
    double largest = -INFINITY, total = 0, doubt = 0;
    for (int i = 0; i < count; i++) {
        largest = fmax(largest, p->value[i]);
        doubt = fmax(doubt, p->error[i] + 2e-7 * fabs(p->value[i]));
    }
    for (int i = 0; i < count; i++) total += p->value[i] = exp(p->value[i] - largest);
    for (int i = 0; i < count; i++) {
        p->value[i] /= total;
        p->error[i] = p->value[i] * (expm1(2 * doubt) + FINAL) + 1e-37; /* float32 ends there */
    }
}

typedef struct {
    problem_matrix made;
    moert_router router;
    int tokens;
    float *x;
    float *hidden, *found;             /* what an engine finds: hidden states and scores */
    float *first_hidden, *first_found; /* what the first one found */
    estimate normed, own;              /* own: what the matrix gets, if not that */
} scores;

/* Those of one token; without a norm of its own the matrix gets what the engine found. */
static void expect_scores(const scores *s, int token, estimate *p) {
    int cols = s->made.matrix.cols, count = s->made.matrix.rows;
    estimate x = s->router.own.weight ? estimate_at(&s->own, token * cols) : estimate_of(s->hidden + token * cols, cols);
    plain_multiply(&s->made, &x, INNER, p);
    if (s->router.score == MOERT_SOFTMAX) softmax(count, p);
    if (s->router.score == MOERT_SIGMOID) plain_sigmoid(p, count, p);
    if (!s->router.own.weight) estimate_free(&x);
}

static void run_scores(scores *s, const engine *on) {
    int count = s->made.matrix.rows, cols = s->made.matrix.cols;
    estimate p = estimate_make(count);
    fill(s->hidden, s->tokens * cols), fill(s->found, s->tokens * count);
    require(on, !moert_scores(on->pool, &s->router, s->tokens, s->x, s->hidden, s->found), "no memory");
    check(on, "hidden", s->hidden, &s->normed, s->tokens * cols);
    for (int t = 0; t < s->tokens; t++) {
        expect_scores(s, t, &p);
        check(on, "scores", s->found + t * count, &p, count);
    }
    agree(on, "hidden", s->hidden, s->first_hidden, s->tokens * cols, EVERYWHERE);
    agree(on, "scores", s->found, s->first_found, s->tokens * count,
          s->router.score >= MOERT_SIGMOID_OF_CHOSEN ? EVERYWHERE : HERE);
    for (int t = 0; t < s->tokens; t++) {
        fill(s->hidden, cols), fill(s->found, count);
        require(on, !moert_scores(on->pool, &s->router, 1, s->x + t * cols, s->hidden, s->found), "no memory");
        again(on, "hidden of one token", s->hidden, s->first_hidden + t * cols, cols);
        again(on, "scores of one token", s->found, s->first_found + t * count, count);
    }
    estimate_free(&p);
}

static void one_scores(int number) {
    int count = number % 10 ? 1 + draw(70) : 1, cols = PICK(1, 16, 33, 64, 100, 256);
    scores s = {.tokens = PICK(1, 2, 7, 40)};
    s.made = matrix_make(kinds[number % 4], count, cols, 0, PLAIN);
    size_t hidden_bytes = (size_t)(s.tokens * cols) * sizeof(float), bytes = (size_t)(s.tokens * count) * sizeof(float);
    s.router = (moert_router){.norm = norm_make(cols, 1e-5f), .matrix = s.made.matrix, .score = number / 4 % 4};
    if (draw(3) == 0) s.router.own = norm_make(cols, 1e-3f);
    s.x = draw_floats(s.tokens * cols);
    s.hidden = claim(hidden_bytes), s.first_hidden = claim(hidden_bytes);
    s.found = claim(bytes), s.first_found = claim(bytes);
    s.normed = estimate_make(s.tokens * cols), s.own = estimate_make(s.tokens * cols);
    estimate input = estimate_of(s.x, s.tokens * cols);
    describe("scores: kind %d, %d experts, %d cols, %d tokens, score %d, own norm %d, bias %d", s.made.matrix.kind, count,
             cols, s.tokens, s.router.score, s.router.own.weight != NULL, s.made.matrix.bias != NULL);
    for (int t = 0; t < s.tokens; t++) {
        estimate token = estimate_at(&input, t * cols), normed = estimate_at(&s.normed, t * cols);
        estimate own = estimate_at(&s.own, t * cols);
        plain_norm(&token, &s.router.norm, 1, cols, &normed);
        if (s.router.own.weight) plain_norm(&token, &s.router.own, 1, cols, &own);
    }
    for (int e = 0; e < engine_count; e++) run_scores(&s, &engines[e]);
    matrix_free(&s.made), norm_free(&s.router.norm), norm_free(&s.router.own);
    estimate_free(&input), estimate_free(&s.normed), estimate_free(&s.own);
    free(s.x), free(s.hidden), free(s.found), free(s.first_hidden), free(s.first_found);
}

void scores_cases(void) {
    for (int number = 0; number < 120; number++) {
        seed(7000 + (uint64_t)number);
        one_scores(number);
    }
}

/* How many come before this one: the larger ones, and of equal ones the earlier. */
static int rank(const float *numbers, const int *allowed, int count, int of) {
    int before = 0;
    for (int i = 0; i < count; i++)
        before += (!allowed || allowed[i]) && (numbers[i] > numbers[of] || (numbers[i] == numbers[of] && i < of));
    return before;
}

/* How good a group is: the sum of its best, the largest first. */
static float worth(const float *deciding, int size, int top) {
    float sum = 0;
    for (int place = 0; place < top && place < size; place++)
        for (int i = 0; i < size; i++)
            if (rank(deciding, NULL, size, i) == place) sum += deciding[i];
    return sum;
}

/* What is preferred: once the `sure` best are taken, `bonus` for those that are `recent` [experts]. */
typedef struct {
    float bonus;
    int sure;
    const int *recent;
} liking;

static const liking nothing = {.sure = MOST_CHOSEN};

static float raised(const liking *l, const float *numbers, int of) {
    return l->recent && l->recent[of] ? numbers[of] + l->bonus : numbers[of];
}

/* Chosen experts of one token and their weights; gives how many. */
static int choose_best(const moert_router *r, const float *p, const liking *l, int64_t *chosen, double *weights) {
    int count = r->matrix.rows, found = 0, size = r->groups ? count / r->groups : count;
    int sure = l->sure < r->top_k ? l->sure : r->top_k;
    float *deciding = claim((size_t)count * sizeof *deciding), *worths = claim((size_t)count * sizeof *worths);
    int *allowed = claim((size_t)count * sizeof *allowed), *taken = claim((size_t)count * sizeof *taken);
    for (int i = 0; i < count; i++) deciding[i] = r->choice_bias ? p[i] + r->choice_bias[i] : p[i];
    for (int g = 0; g < r->groups; g++) worths[g] = worth(deciding + g * size, size, r->group_top);
    for (int i = 0; i < count; i++) allowed[i] = !r->groups || rank(worths, NULL, r->groups, i / size) < r->best_groups;
    for (int i = 0; i < count; i++) taken[i] = allowed[i] && rank(deciding, allowed, count, i) < sure;
    for (int i = 0; i < count; i++) allowed[i] = allowed[i] && !taken[i], deciding[i] = raised(l, deciding, i);
    for (int i = 0; i < count && found < r->top_k; i++)
        if (taken[i] || (allowed[i] && rank(deciding, allowed, count, i) < r->top_k - sure))
            chosen[found] = i, weights[found++] = p[i];
    free(deciding), free(worths), free(allowed), free(taken);
    return found;
}

/* One after the other; then ascending by number. */
static int choose_sparsely(const moert_router *r, const float *p, const liking *l, int64_t *chosen, double *weights) {
    int count = r->matrix.rows, found = 0;
    double *of = claim((size_t)count * sizeof *of);
    for (int i = 0; i < count; i++) of[i] = -1;
    for (int round = 0; round < r->top_k; round++) {
        const liking *now = round < l->sure ? &nothing : l;
        int best = -1;
        double sum = 0;
        for (int i = 0; i < count; i++)
            if (of[i] < 0 && (best < 0 || raised(now, p, i) > raised(now, p, best))) best = i;
        for (int i = 0; i < count; i++) {
            float below = p[best] - p[i];
            int near = below == 0 || below / fmaxf(fabsf(p[i]), p[best]) <= 2 * r->jitter;
            if (of[i] < 0 && near) sum += exp(-(double)below);
        }
        of[best] = 1 / sum;
    }
    for (int i = 0; i < count; i++)
        if (of[i] >= 0) chosen[found] = i, weights[found++] = of[i];
    free(of);
    return found;
}

static void check_choice(const moert_router *r, const float *p, const liking *l, const int64_t *chosen, const float *weights) {
    int64_t experts[MOST_CHOSEN];
    double value[MOST_CHOSEN], error[MOST_CHOSEN], sum = 0;
    estimate expected = {value, error};
    int sparse = r->score == MOERT_SPARSEMIXER, after = r->score == MOERT_SIGMOID_OF_CHOSEN, top_k = r->top_k;
    int found = sparse ? choose_sparsely(r, p, l, experts, value) : choose_best(r, p, l, experts, value);
    require(engines, found == top_k && !memcmp(chosen, experts, (size_t)top_k * sizeof *chosen), "other experts");
    for (int i = 0; i < top_k && after; i++) value[i] = 1 / (1 + exp(-value[i]));
    for (int i = 0; i < top_k; i++) sum += value[i];
    for (int i = 0; i < top_k; i++) {
        value[i] *= (double)r->factor / (r->renormalise ? sum : 1);
        if (r->expert_scale) value[i] *= r->expert_scale[experts[i]];
        error[i] = sparse || after || r->renormalise ? INNER * fabs(value[i]) : 3e-7 * fabs(value[i]);
        if (!sparse && !after && !r->renormalise && !r->expert_scale && r->factor == 1) error[i] = 0;
    }
    check(engines, "weights", weights, &expected, top_k);
}

/* The instruction set has no part in it. `steps`: how many different scores there are, so that some are equal. */
static void one_choose(const moert_router *r, int tokens, int steps) {
    int count = r->matrix.rows, sparse = r->score == MOERT_SPARSEMIXER;
    size_t bytes = (size_t)(tokens * count) * sizeof(float);
    float *p = claim(bytes), *weights = claim((size_t)(tokens * r->top_k) * sizeof *weights);
    int64_t *chosen = claim((size_t)(tokens * r->top_k) * sizeof *chosen);
    describe("choose: %d of %d, score %d, jitter %g, renormalise %d, %d of %d groups by %d, bias %d, scales %d, factor %g, "
             "%d tokens, %d steps", r->top_k, count, r->score, r->jitter, r->renormalise, r->best_groups, r->groups,
             r->group_top, r->choice_bias != NULL, r->expert_scale != NULL, r->factor, tokens, steps);
    for (int i = 0; i < tokens * count; i++) p[i] = (float)(draw(steps) - sparse * (steps / 2)) / (float)steps;
    for (int i = 0; i < tokens * count && !sparse; i++) p[i] += 0.001f; /* a sum of 0 does not happen */
    fill(weights, tokens * r->top_k);
    require(engines, !moert_choose(engines->pool, r, p, tokens, chosen, weights), "no memory");
    for (int t = 0; t < tokens; t++) check_choice(r, p + t * count, &nothing, chosen + t * r->top_k, weights + t * r->top_k);
    free(p), free(weights), free(chosen);
}

/* Whether `after` [k] is what `before` [k] and the chosen make: these first, then the others in the order they were in. */
static int follows(const int32_t *after, const int32_t *before, int k, const int64_t *chosen, int top_k) {
    int place = 0, right = 1;
    for (; place < top_k && place < k; place++) right &= after[place] == chosen[place];
    for (int i = 0; i < k && place < k; i++) {
        int again = 0;
        for (int c = 0; c < top_k; c++) again |= chosen[c] == before[i];
        if (!again) right &= after[place++] == before[i];
    }
    return right;
}

/* Tokens of one sequence, one after the other. */
static void one_prefer(const moert_router *r, int tokens, int steps) {
    int count = r->matrix.rows, top_k = r->top_k, k = top_k + draw(count - top_k + 1), *is_recent;
    int32_t *recent = claim((size_t)k * sizeof *recent), *before = claim((size_t)k * sizeof *before);
    float *p = claim((size_t)count * sizeof *p), weights[MOST_CHOSEN];
    int64_t chosen[MOST_CHOSEN];
    liking l = {.bonus = PICK(0, 1, 3) * 0.21f, .sure = draw(top_k + 2), .recent = NULL};
    describe("prefer: %d of %d, score %d, %d of %d groups, bias %d, by %g behind %d, the last %d", top_k, count, r->score,
             r->best_groups, r->groups, r->choice_bias != NULL, l.bonus, l.sure, k);
    l.recent = is_recent = claim((size_t)count * sizeof *is_recent);
    for (int i = 0; i < k; i++) recent[i] = -1;
    for (int t = 0; t < tokens; t++) {
        for (int i = 0; i < count; i++) p[i] = (float)(1 + draw(steps)) / (float)steps, is_recent[i] = 0;
        for (int i = 0; i < k && recent[i] >= 0; i++) is_recent[recent[i]] = 1;
        memcpy(before, recent, (size_t)k * sizeof *recent);
        require(engines, !moert_prefer(r, p, l.bonus, l.sure, k, recent, chosen, weights), "no memory");
        check_choice(r, p, &l, chosen, weights);
        require(engines, follows(recent, before, k, chosen, top_k), "others are recent");
    }
    free(recent), free(before), free(is_recent), free(p);
}

static void draw_groups(moert_router *r) {
    r->groups = 1 + draw(6), r->matrix.rows = r->groups * (1 + draw(12));
    r->best_groups = 1 + draw(r->groups), r->group_top = 1 + draw(2);
}

static void draw_choose(int number) {
    moert_router r = {.matrix = {.rows = number % 10 ? 1 + draw(70) : 1}, .score = number / 4 % 4};
    r.factor = draw(2) ? 1 : 2.5f;
    int sparse = r.score == MOERT_SPARSEMIXER;
    float *bias = NULL, *scales = NULL;
    if (!sparse && draw(2)) draw_groups(&r);
    int left = r.groups ? r.matrix.rows / r.groups * r.best_groups : r.matrix.rows;
    int least = left < MOST_CHOSEN ? left : MOST_CHOSEN;
    r.top_k = number % 4 ? 1 + draw(least) : least, r.renormalise = draw(2);
    r.jitter = sparse ? (float[]){0, 0.01f, 0.2f}[draw(3)] : 0;
    if (!sparse && draw(2)) r.choice_bias = bias = draw_floats(r.matrix.rows);
    if (draw(3) == 0) r.expert_scale = scales = draw_floats(r.matrix.rows);
    int tokens = 1 + draw(9);
    one_choose(&r, tokens, PICK(2, 5, 1 << 20));
    one_prefer(&r, 2 * tokens, PICK(2, 5, 1 << 20));
    free(bias), free(scales);
}

void choose_cases(void) {
    for (int number = 0; number < 360; number++) {
        seed(7500 + (uint64_t)number);
        draw_choose(number);
    }
}

static void one_gate(int number) {
    int cols = PICK(1, 16, 33, 64, 256), tokens = PICK(1, 2, 7, 40);
    problem_matrix made = matrix_make(kinds[number % 4], 1, cols, 0, PLAIN);
    float factor = draw(2) ? 1 : draw_float(), *x = draw_floats(tokens * cols), alone;
    float *y = claim((size_t)tokens * sizeof *y), *first = claim((size_t)tokens * sizeof *first);
    estimate expected = estimate_make(tokens);
    describe("gate: kind %d, %d cols, %d tokens, factor %g", made.matrix.kind, cols, tokens, factor);
    for (int t = 0; t < tokens; t++) {
        estimate token = estimate_of(x + t * cols, cols), one = estimate_at(&expected, t);
        plain_multiply(&made, &token, INNER, &one);
        plain_sigmoid(&one, 1, &one);
        one.value[0] *= factor, one.error[0] = fabs(factor) * one.error[0] + 1e-7 * fabs(one.value[0]);
        estimate_free(&token);
    }
    for (int e = 0; e < engine_count; e++) {
        fill(y, tokens);
        require(&engines[e], !moert_gate(engines[e].pool, &made.matrix, tokens, x, factor, y), "no memory");
        check(&engines[e], "gate", y, &expected, tokens);
        agree(&engines[e], "gate", y, first, tokens, HERE);
        for (int t = 0; t < tokens; t++) {
            require(&engines[e], !moert_gate(engines[e].pool, &made.matrix, 1, x + t * cols, factor, &alone), "no memory");
            again(&engines[e], "gate of one token", &alone, first + t, 1);
        }
    }
    matrix_free(&made);
    estimate_free(&expected);
    free(x), free(y), free(first);
}

void gate_cases(void) {
    for (int number = 0; number < 40; number++) {
        seed(7900 + (uint64_t)number);
        one_gate(number);
    }
}
