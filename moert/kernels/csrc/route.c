/* The router before the experts: scores, and which experts a token goes to. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "products.h"

/* Probabilities in place of n numbers; those that are -infinity get 0. */
static void softmax(float *scores, int n) {
    float most = scores[0], sum = 0;
    for (int i = 1; i < n; i++) most = scores[i] > most ? scores[i] : most;
    for (int i = 0; i < n; i++) sum += scores[i] = expf(scores[i] - most);
    for (int i = 0; i < n; i++) scores[i] /= sum;
}

static void sigmoids(float *scores, int n) {
    for (int i = 0; i < n; i++) scores[i] = 1 / (1 + expf(-scores[i]));
}

static void roots(float *scores, int n) {
    for (int i = 0; i < n; i++) scores[i] = sqrtf(fmaxf(scores[i], 0) + log1pf(expf(-fabsf(scores[i]))));
}

typedef struct {
    const moert_router *router;
    float *scores;
} weigh_job;

static void weigh_item(const void *job, int token, void *own) {
    const weigh_job *j = job;
    const int n = j->router->matrix.rows;
    float *scores = j->scores + (int64_t)token * n;
    (void)own;
    if (j->router->score == MOERT_SOFTMAX) softmax(scores, n);
    else if (j->router->score == MOERT_SIGMOID) sigmoids(scores, n);
    else roots(scores, n);
}

int moert_scores(moert_pool *pool, const moert_router *router, int tokens, const float *x, float *hidden, float *scores) {
    const moert_matrix *matrix = &router->matrix;
    const int n = matrix->rows;
    moert_normalise(pool, router->own.weight ? &router->own : &router->norm, tokens, matrix->cols, x, hidden);
    if (moert_linear(pool, 1, &matrix, hidden, tokens, &scores)) return -1;
    if (router->own.weight) moert_normalise(pool, &router->norm, tokens, matrix->cols, x, hidden);
    if (router->score != MOERT_SIGMOID_OF_CHOSEN && router->score != MOERT_SPARSEMIXER)
        run_items(pool, weigh_item, &(weigh_job){router, scores}, tokens, 32LL * tokens * n);
    return 0;
}

int moert_gate(moert_pool *pool, const moert_matrix *matrix, int tokens, const float *hidden, float factor, float *y) {
    if (moert_linear(pool, 1, &matrix, hidden, tokens, &y)) return -1;
    sigmoids(y, tokens);
    for (int token = 0; token < tokens; token++) y[token] *= factor;
    return 0;
}

/* Room for one token: numbers that decide, and of each group. */
typedef struct {
    float *deciding, *groups;
} decision;

/* The first of the largest of n, which then can't be chosen again; -1 if none is left. */
static int take_largest(float *numbers, int n) {
    int best = -1;
    for (int i = 0; i < n; i++)
        if (numbers[i] > -INFINITY && (best < 0 || numbers[i] > numbers[best])) best = i;
    if (best >= 0) numbers[best] = -INFINITY;
    return best;
}

/* Leaves only the best groups to be chosen from. `spare`: room for the numbers of a group. */
static void keep_groups(const moert_router *r, const decision *d, int n, float *spare) {
    const int size = n / r->groups;
    for (int g = 0; g < r->groups; g++) {
        for (int i = 0; i < size; i++) spare[i] = d->deciding[g * size + i];
        d->groups[g] = 0;
        for (int i = 0; i < r->group_top && i < size; i++) {
            const int best = take_largest(spare, size);
            if (best >= 0) d->groups[g] += d->deciding[g * size + best];
        }
    }
    for (int kept = 0; kept < r->best_groups; kept++) take_largest(d->groups, r->groups);
    for (int g = 0; g < r->groups; g++)
        for (int i = 0; i < size && d->groups[g] > -INFINITY; i++) d->deciding[g * size + i] = -INFINITY;
}

/* Experts that are to be preferred, and how much; see moert_prefer. NULL: none. */
typedef struct {
    float bonus;
    int sure, k;
    const int32_t *recent;
} preference;

/* Once the sure ones are taken, what decides is raised for the recent ones; what can't be chosen stays so. */
static void prefer(float *deciding, const preference *p, int found) {
    if (!p || found != p->sure) return;
    for (int i = 0; i < p->k && p->recent[i] >= 0; i++) deciding[p->recent[i]] += p->bonus;
}

/* Puts a choice where it belongs: ascending by number. */
static void put(int64_t expert, float weight, int found, int64_t *chosen, float *weights) {
    int place = found;
    for (; place > 0 && chosen[place - 1] > expert; place--) {
        chosen[place] = chosen[place - 1];
        weights[place] = weights[place - 1];
    }
    chosen[place] = expert;
    weights[place] = weight;
}

/* The best that is left; where none of them is a number, the first that is not chosen. */
static int take_best(float *deciding, int n, const int64_t *chosen, int found) {
    int best = take_largest(deciding, n);
    for (int i = 0; best < 0 && i < n; i++) {
        int taken = 0;
        for (int c = 0; c < found; c++) taken |= chosen[c] == i;
        best = taken ? -1 : i;
    }
    return best;
}

static void choose_best(const moert_router *r, const float *scores, const decision *d, int n, const preference *p,
                        int64_t *chosen, float *weights) {
    for (int i = 0; i < n; i++) d->deciding[i] = scores[i] + (r->choice_bias ? r->choice_bias[i] : 0);
    if (r->groups) keep_groups(r, d, n, d->groups + r->groups);
    for (int found = 0; found < r->top_k; found++) {
        prefer(d->deciding, p, found);
        const int best = take_best(d->deciding, n, chosen, found);
        put(best, scores[best], found, chosen, weights);
    }
}

static void choose_sparsely(const moert_router *r, const float *scores, const decision *d, int n, const preference *p,
                            int64_t *chosen, float *weights) {
    for (int i = 0; i < n; i++) d->deciding[i] = scores[i];
    for (int found = 0; found < r->top_k; found++) {
        prefer(d->deciding, p, found);
        const int best = take_best(d->deciding, n, chosen, found);
        const float most = scores[best];
        float sum = 1;
        for (int i = 0; i < n; i++) {
            const float magnitude = fabsf(scores[i]) > most ? fabsf(scores[i]) : most;
            const int far = (most - scores[i]) / magnitude > 2 * r->jitter; /* two zeros are not */
            if (!far && d->deciding[i] > -INFINITY) sum += expf(scores[i] - most);
        }
        put(best, 1 / sum, found, chosen, weights);
    }
}

/* One token's experts and their weights. `room`: 2 n + groups numbers. */
static void choose(const moert_router *r, const float *scores, float *room, const preference *p, int64_t *chosen,
                   float *weights) {
    const int n = r->matrix.rows, top_k = r->top_k;
    const decision d = {room, room + n};
    float sum = 0;
    if (r->score == MOERT_SPARSEMIXER) choose_sparsely(r, scores, &d, n, p, chosen, weights);
    else choose_best(r, scores, &d, n, p, chosen, weights);
    if (r->score == MOERT_SIGMOID_OF_CHOSEN) sigmoids(weights, top_k);
    for (int i = 0; i < top_k; i++) sum += weights[i];
    for (int i = 0; i < top_k; i++) {
        if (r->renormalise) weights[i] /= sum;
        if (r->expert_scale) weights[i] *= r->expert_scale[chosen[i]];
        weights[i] *= r->factor;
    }
}

static size_t room_bytes(const moert_router *r) { return (size_t)(2 * r->matrix.rows + r->groups) * sizeof(float); }

typedef struct {
    const moert_router *router;
    const float *scores;
    int64_t *chosen;
    float *weights;
} choose_job;

static void choose_item(const void *job, int token, void *own) {
    const choose_job *j = job;
    const moert_router *r = j->router;
    const int64_t at = (int64_t)token * r->top_k;
    choose(r, j->scores + (int64_t)token * r->matrix.rows, own, NULL, j->chosen + at, j->weights + at);
}

int moert_choose(moert_pool *pool, const moert_router *r, const float *scores, int tokens, int64_t *chosen, float *weights) {
    const choose_job job = {r, scores, chosen, weights};
    if (pool_own(pool, room_bytes(r))) return -1;
    run_items(pool, choose_item, &job, tokens, 8LL * tokens * r->matrix.rows * r->top_k);
    return 0;
}

/* The chosen come first, and as many of the others behind them as there is room for. */
static void remember(int top_k, const int64_t *chosen, int k, int32_t *recent, int32_t *before) {
    int kept = 0;
    memcpy(before, recent, (size_t)k * sizeof *recent);
    for (; kept < top_k && kept < k; kept++) recent[kept] = (int32_t)chosen[kept];
    for (int i = 0; i < k && kept < k && before[i] >= 0; i++) {
        int again = 0;
        for (int c = 0; c < top_k; c++) again |= chosen[c] == before[i];
        if (!again) recent[kept++] = before[i];
    }
}

int moert_prefer(const moert_router *r, const float *scores, float bonus, int sure, int k, int32_t *recent, int64_t *chosen,
                 float *weights) {
    const preference p = {bonus, sure, k, recent};
    float *room = malloc(room_bytes(r));
    int32_t *before = malloc((size_t)k * sizeof *before);
    if (room && before) {
        choose(r, scores, room, &p, chosen, weights);
        remember(r->top_k, chosen, k, recent, before);
    }
    const int failed = !room || !before;
    free(room);
    free(before);
    return failed ? -1 : 0;
}
