/* Which experts leave when room is needed: what moert/experts/policy says in numpy, number by number the same. */
#include "moert.h"

#define RARELY 1e-9 /* stands for the probability of what was never demanded */

/* What one is worth: the smallest leaves first. */
static double worth_of(const moert_residents *all, int64_t row) {
    const int64_t at = all->place[row];
    if (all->rule == MOERT_RECENCY)
        return (double)(all->last_used[row] > all->loaded_at[row] ? all->last_used[row] : all->loaded_at[row]);
    if (all->rule == MOERT_FREQUENCY) return (double)all->frequency[row];
    if (all->rule == MOERT_NEARNESS) return all->nearness[at] < 0 ? -1 : (double)(all->frequency[row] * all->nearness[at]);
    const int64_t visits = all->visits[at], age = visits - all->last_visit[row];
    const double often = (double)all->frequency[row] / (double)(visits > 1 ? visits : 1);
    const double kept = age < all->forgotten_n ? all->forgotten[age < 0 ? 0 : age] : 0;
    const double lately = all->remembered * all->recent[row] * kept;
    double probability = 0.5 * (often + lately);
    if (all->following) {
        const double following = all->following[at * all->experts + (all->order[row] & 0xFFFF)];
        if (following == following) probability = 0.5 * (probability + following);
    }
    const double until = 1.0 / (probability > RARELY ? probability : RARELY);
    double wait = all->visited_at[at] + all->interval[at] - (double)all->steps;
    if (wait < 0.5) wait = 0.5;
    return -(wait + all->interval[at] * (until - 1.0));
}

/* Whether row a leaves before row b. */
static int before(const moert_residents *all, const double *worth, int64_t a, int64_t b) {
    if (worth[a] != worth[b]) return worth[a] < worth[b];
    if (all->last_used[a] != all->last_used[b]) return all->last_used[a] < all->last_used[b];
    return all->order[a] < all->order[b];
}

/* Lets rows[at] sink among n rows of which each stands above the two that leave after it. */
static void sink(const moert_residents *all, const double *worth, int64_t *rows, int64_t at, int64_t n) {
    for (int64_t below; (below = 2 * at + 1) < n; at = below) {
        if (below + 1 < n && before(all, worth, rows[below + 1], rows[below])) below++;
        if (!before(all, worth, rows[below], rows[at])) return;
        const int64_t row = rows[at];
        rows[at] = rows[below], rows[below] = row;
    }
}

int64_t moert_leave(const moert_residents *all, const uint8_t *free, int64_t missing, double *worth, int64_t *leaving) {
    int64_t n = 0, left;
    for (int64_t row = 0; row < all->rows; row++)
        if (free[row]) worth[row] = worth_of(all, row), leaving[n++] = row;
    for (int64_t at = n / 2 - 1; at >= 0; at--) sink(all, worth, leaving, at, n);
    for (left = n; left && missing > 0;) {
        const int64_t row = leaving[0];
        leaving[0] = leaving[--left], leaving[left] = row; /* those that leave stand behind the others, the first last */
        missing -= all->nbytes[row];
        sink(all, worth, leaving, 0, left);
    }
    for (int64_t i = 0, j = n - 1; i < j; i++, j--) {
        const int64_t row = leaving[i];
        leaving[i] = leaving[j], leaving[j] = row;
    }
    return n - left;
}
