/* The experts of a layer, all in one call: gate and up of every expert, then down of every expert, then the sum. */
#include "products.h"

#define GATES 1024   /* kept on the stack: of some rows for up to TOKENS_AT_ONCE tokens */
#define TOKENS_AT_ONCE 16
#define SUM_COLS 512 /* outputs that make one item of the sum */

/* Gate, up and activation of one expert. */
typedef struct {
    const input *in;
    const moert_ffn *ffn;
    const int32_t *tokens;
    float *hidden; /* [n, d_ff] */
    float limit;
    int activation, n, block, items;
} expansion;

typedef struct {
    const expansion *experts;
    int count;
} expansions;

typedef struct {
    const operations *isa;
    const float *parts, *weights; /* [rows, cols], [rows] */
    const int32_t *tokens;
    float *out;
    int rows, cols;
} weighted_sum;

static void expand_item(const void *job, int item) {
    const expansions *all = job;
    LOCATE(i, item, all->experts, all->count);
    const expansion *e = &all->experts[i];
    const moert_ffn *ffn = e->ffn;
    const int d_ff = ffn->up.rows, first = item * e->block, stop = first + e->block < d_ff ? first + e->block : d_ff;
    const int most = e->n < TOKENS_AT_ONCE ? GATES / e->n : GATES / TOKENS_AT_ONCE;
    float gate[GATES];
    for (int at = first; at < stop; at += most) {
        const int end = at + most < stop ? at + most : stop, size = end - at;
        for (int t = 0; t < e->n; t += TOKENS_AT_ONCE) {
            const int n = e->n - t < TOKENS_AT_ONCE ? e->n - t : TOKENS_AT_ONCE;
            float *up = e->hidden + (int64_t)t * d_ff + at;
            multiply(e->in, &ffn->up, e->tokens + t, n, at, end, up, d_ff);
            if (ffn->gate.data) multiply(e->in, &ffn->gate, e->tokens + t, n, at, end, gate, size);
            for (int i = 0; i < n; i++)
                e->in->isa->activate(e->activation, e->limit, ffn->gate.data ? gate + i * size : NULL,
                                     up + (int64_t)i * d_ff, size);
        }
    }
}

static void sum_item(const void *job, int item) {
    const weighted_sum *s = job;
    const int first = item * SUM_COLS, n = s->cols - first < SUM_COLS ? s->cols - first : SUM_COLS;
    for (int r = 0; r < s->rows; r++)
        s->isa->add(s->weights[r], s->parts + (int64_t)r * s->cols + first,
                    s->out + (int64_t)s->tokens[r] * s->cols + first, n);
}

/* parts [rows, d_model]: what the expert of each row makes of its token, not weighted yet; `*made` where that is. Without
 * `parts` it is made in scratch, where it stays until the next call of anything. */
static int make_parts(moert_pool *pool, int activation, float limit, int experts, const moert_ffn *const *ffn,
                      const int32_t *starts, const int32_t *token_of, const float *x, int tokens, float *parts,
                      float **made) {
    const int rows = starts[experts];
    const operations *isa = pool_operations(pool);
    const int d_model = ffn[0]->up.cols, d_ff = ffn[0]->up.rows;
    input before, after;
    input_begin(&before, isa, x, tokens, d_model);
    input_begin(&after, isa, NULL, rows, d_ff);
    for (int e = 0; e < experts; e++) {
        if (ffn[e]->gate.data && input_wants(&before, &ffn[e]->gate)) return -1;
        if (input_wants(&before, &ffn[e]->up) || input_wants(&after, &ffn[e]->down)) return -1;
    }
    const size_t expand_bytes = aligned((size_t)experts * sizeof(expansion));
    const size_t shrink_bytes = aligned((size_t)experts * sizeof(product));
    const size_t hidden_bytes = aligned((size_t)rows * (size_t)d_ff * sizeof(float));
    const size_t parts_bytes = parts ? 0 : aligned((size_t)rows * (size_t)d_model * sizeof(float));
    const size_t number_bytes = aligned((size_t)rows * sizeof(int32_t)), before_bytes = input_bytes(&before);
    char *room = pool_scratch(pool, expand_bytes + shrink_bytes + hidden_bytes + parts_bytes + number_bytes +
                                        before_bytes + input_bytes(&after));
    if (!room) return -1;
    expansion *expand = (expansion *)room;
    product *shrink = (product *)(room += expand_bytes);
    float *hidden = (float *)(room += shrink_bytes);
    room += hidden_bytes;
    if (!parts) parts = (float *)room;
    int32_t *number = (int32_t *)(room += parts_bytes);
    /* One expert alone often takes few of the tokens, each of them once. */
    input_make(&before, pool, room += number_bytes, experts == 1 ? token_of : NULL, experts == 1 ? rows : tokens);
    room += before_bytes;

    int items = 0;
    int64_t bytes = 0, work = 0;
    for (int e = 0; e < experts; e++) {
        const int n = starts[e + 1] - starts[e];
        bytes += n ? matrix_bytes(&ffn[e]->up) : 0;
        work += 2 * n * matrix_bytes(&ffn[e]->up);
    }
    for (int e = 0; e < experts; e++) {
        const int first = starts[e], n = starts[e + 1] - first, block = item_rows(pool, &ffn[e]->up, n, bytes);
        expand[e] = (expansion){&before, ffn[e], token_of + first, hidden + (int64_t)first * d_ff, limit, activation, n,
                                block, n ? (d_ff + block - 1) / block : 0};
        items += expand[e].items;
    }
    run_items(pool, expand_item, &(expansions){expand, experts}, items, work);

    after.values = hidden;
    input_make(&after, pool, room, NULL, rows);
    for (int r = 0; r < rows; r++) number[r] = r;
    for (int e = 0; e < experts; e++) {
        const int first = starts[e], n = starts[e + 1] - first;
        shrink[e] = (product){&after, &ffn[e]->down, parts + (int64_t)first * d_model, d_model, number + first, n, 0, 0};
    }
    run_products(pool, shrink, experts);
    *made = parts;
    return 0;
}

static void add_parts(moert_pool *pool, const float *parts, const float *weights, const int32_t *tokens, int rows,
                      int cols, float *out) {
    const weighted_sum sum = {pool_operations(pool), parts, weights, tokens, out, rows, cols};
    run_items(pool, sum_item, &sum, (cols + SUM_COLS - 1) / SUM_COLS, (int64_t)rows * cols);
}

int moert_mixture(moert_pool *pool, int activation, float limit, int experts, const moert_ffn *const *ffn,
                  const int32_t *starts, const int32_t *token_of, const float *weight_of, const float *x, int tokens,
                  float *out) {
    if (!experts || !starts[experts]) return 0;
    float *parts;
    if (make_parts(pool, activation, limit, experts, ffn, starts, token_of, x, tokens, NULL, &parts)) return -1;
    add_parts(pool, parts, weight_of, token_of, starts[experts], ffn[0]->up.cols, out);
    return 0;
}

int moert_parts(moert_pool *pool, int activation, float limit, int experts, const moert_ffn *const *ffn,
                const int32_t *starts, const int32_t *token_of, const float *x, int tokens, float *parts) {
    if (!experts || !starts[experts]) return 0;
    float *made;
    return make_parts(pool, activation, limit, experts, ffn, starts, token_of, x, tokens, parts, &made);
}

void moert_add_parts(moert_pool *pool, const float *parts, const float *weight_of, const int32_t *token_of, int rows,
                     int cols, float *out) {
    add_parts(pool, parts, weight_of, token_of, rows, cols, out);
}
