/* The experts of a layer, all in one call: gate and up of every expert, then down of every expert, then the sum. */
#include "expansion.h"

#define SUM_COLS 512   /* outputs that make one item of the sum */
#define SUM_ROWS 16384 /* rows between two looks at whether the pool is stopped */

typedef struct {
    const moert_pool *pool;
    const float *parts, *weights; /* [rows, cols], [rows] */
    const int32_t *tokens;
    float *out;
    int rows, cols;
} weighted_sum;

static void sum_item(const void *job, int item, void *own) {
    const weighted_sum *s = job;
    (void)own;
    const int first = item * SUM_COLS, n = s->cols - first < SUM_COLS ? s->cols - first : SUM_COLS;
    const operations *isa = pool_operations(s->pool);
    for (int r = 0; r < s->rows && !(r % SUM_ROWS == 0 && pool_stopped(s->pool)); r++)
        isa->add(s->weights[r], s->parts + (int64_t)r * s->cols + first,
                 s->out + (int64_t)s->tokens[r] * s->cols + first, n);
}

/* What is listed for each expert. */
typedef struct {
    input before, after; /* [tokens, d_model] and [rows, d_ff] */
    columns *x_before, *x_after;
    expansion *expand;
    product *shrink;
    int32_t *number; /* [rows]: each row by itself */
} lists;

/* 0, or -1 if memory ran out or there are too many group sizes. */
static int make_lists(lists *l, moert_pool *pool, int experts, const moert_ffn *const *ffn, const int32_t *starts,
                      const int32_t *token_of) {
    const size_t n = (size_t)experts, rows = (size_t)starts[experts];
    const size_t columns_bytes = aligned(n * sizeof(columns)), expand_bytes = aligned(n * sizeof(expansion));
    const size_t shrink_bytes = aligned(n * sizeof(product));
    char *room = pool_lists(pool, 2 * columns_bytes + expand_bytes + shrink_bytes + rows * sizeof(int32_t));
    if (!room) return -1;
    l->x_before = (columns *)room;
    l->x_after = (columns *)(room += columns_bytes);
    l->expand = (expansion *)(room += columns_bytes);
    l->shrink = (product *)(room += expand_bytes);
    l->number = (int32_t *)(room + shrink_bytes);
    for (size_t r = 0; r < rows; r++) l->number[r] = (int32_t)r;
    for (int e = 0; e < experts; e++) {
        const int first = starts[e], count = starts[e + 1] - first;
        columns *before = &l->x_before[e], *after = &l->x_after[e];
        columns_begin(before, &l->before, token_of + first, count);
        columns_begin(after, &l->after, l->number + first, count);
        if (ffn[e]->gate.data && input_wants(&l->before, before, &ffn[e]->gate)) return -1;
        if (input_wants(&l->before, before, &ffn[e]->up) || input_wants(&l->after, after, &ffn[e]->down)) return -1;
    }
    return 0;
}

/* parts [rows, d_model]: what the expert of each row makes of its token, not weighted yet; `*made` where that is. Without
 * `parts` it is made in scratch, where it stays until the next call of anything. */
static int make_parts(moert_pool *pool, const moert_act *act, int experts, const moert_ffn *const *ffn,
                      const int32_t *starts, const int32_t *token_of, const float *x, int tokens, float *parts,
                      float **made) {
    const int rows = starts[experts], d_model = ffn[0]->up.cols, d_ff = ffn[0]->up.rows;
    lists l;
    input_begin(&l.before, pool_operations(pool), x, tokens, d_model);
    input_begin(&l.after, pool_operations(pool), NULL, rows, d_ff);
    if (make_lists(&l, pool, experts, ffn, starts, token_of)) return -1;
    const size_t hidden_bytes = aligned((size_t)rows * (size_t)d_ff * sizeof(float));
    const size_t parts_bytes = parts ? 0 : aligned((size_t)rows * (size_t)d_model * sizeof(float));
    const size_t before_bytes = input_bytes(&l.before, l.x_before, experts);
    const size_t after_bytes = input_bytes(&l.after, l.x_after, experts);
    char *room = pool_scratch(pool, hidden_bytes + parts_bytes + before_bytes + after_bytes);
    if (!room) return -1;
    float *hidden = (float *)room;
    if (!parts) parts = (float *)(room + hidden_bytes);
    room += hidden_bytes + parts_bytes;

    /* One expert alone often takes few of the tokens, each of them once. */
    const int alone = experts == 1;
    input_make(&l.before, l.x_before, experts, pool, room, alone ? token_of : NULL, alone ? rows : tokens);
    for (int e = 0; e < experts; e++) {
        float *to = hidden + (int64_t)starts[e] * d_ff;
        l.expand[e] = (expansion){&l.x_before[e], ffn[e], to, act, 0, 0};
        l.shrink[e] = (product){&l.x_after[e], &ffn[e]->down, parts + (int64_t)starts[e] * d_model, d_model, 0, 0, 0, 0};
    }
    if (expand(pool, l.expand, experts)) return -1;

    l.after.values = hidden;
    input_make(&l.after, l.x_after, experts, pool, room + before_bytes, NULL, rows);
    *made = parts;
    return run_products(pool, l.shrink, experts);
}

static void add_parts(moert_pool *pool, const float *parts, const float *weights, const int32_t *tokens, int rows,
                      int cols, float *out) {
    const weighted_sum sum = {pool, parts, weights, tokens, out, rows, cols};
    run_items(pool, sum_item, &sum, (cols + SUM_COLS - 1) / SUM_COLS, (int64_t)rows * cols);
}

int moert_mixture(moert_pool *pool, const moert_act *act, int experts, const moert_ffn *const *ffn, const int32_t *starts,
                  const int32_t *token_of, const float *weight_of, const float *x, int tokens, float *out) {
    if (!experts || !starts[experts]) return 0;
    float *parts;
    if (make_parts(pool, act, experts, ffn, starts, token_of, x, tokens, NULL, &parts)) return -1;
    add_parts(pool, parts, weight_of, token_of, starts[experts], ffn[0]->up.cols, out);
    return 0;
}

int moert_parts(moert_pool *pool, const moert_act *act, int experts, const moert_ffn *const *ffn, const int32_t *starts,
                const int32_t *token_of, const float *x, int tokens, float *parts) {
    if (!experts || !starts[experts]) return 0;
    float *made;
    return make_parts(pool, act, experts, ffn, starts, token_of, x, tokens, parts, &made);
}

void moert_add_parts(moert_pool *pool, const float *parts, const float *weight_of, const int32_t *token_of, int rows,
                     int cols, float *out) {
    add_parts(pool, parts, weight_of, token_of, rows, cols, out);
}
