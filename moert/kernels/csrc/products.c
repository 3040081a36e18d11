/* Matrices times activations, cut into items for the pool. */
#include "products.h"

#define MOST_ITEM_BYTES (256 << 10) /* of weights: what is asked for ahead at an item's end is lost to its thread */
#define ITEMS_A_THREAD 4            /* at least, where there is enough: so that threads end together */
#define ALONE_BYTES (128 << 10)     /* below this, waking others costs more than they save */
#define MANY_ROWS_AN_ITEM 32        /* for many tokens, when arithmetic counts and not bytes */

void input_begin(input *in, const operations *isa, const float *values, int tokens, int cols) {
    *in = (input){.isa = isa, .values = values, .tokens = tokens, .cols = cols};
}

static int grouping(const input *in, const moert_matrix *w) {
    int i = 0;
    while (i < in->count && in->rounded[i].group != w->group) i++;
    return i;
}

int input_wants(input *in, const moert_matrix *w) {
    if (!is_codes(w)) return 0;
    int i = grouping(in, w);
    if (i == MOST_GROUPINGS) return -1;
    if (i == in->count) in->rounded[in->count++].group = w->group;
    in->orders[i] |= 1 << order_of(w->kind);
    return 0;
}

size_t input_bytes(const input *in) {
    size_t bytes = 0;
    for (int i = 0; i < in->count; i++)
        bytes += in->isa->operand_bytes(in->tokens, in->cols, in->rounded[i].group, in->orders[i]);
    return bytes;
}

/* Gives the rounded activations their place. */
static void input_place(input *in, void *room) {
    char *at = room;
    for (int i = 0; i < in->count; i++) {
        const int group = in->rounded[i].group;
        in->isa->operand_place(&in->rounded[i], at, in->tokens, in->cols, group, in->orders[i]);
        at += in->isa->operand_bytes(in->tokens, in->cols, group, in->orders[i]);
    }
}

/* Makes those of one token. */
static void input_fill(const input *in, int token) {
    for (int i = 0; i < in->count; i++)
        in->isa->operand_fill(&in->rounded[i], token, in->values + (int64_t)token * in->cols);
}

typedef struct {
    const input *in;
    const int32_t *tokens;
} fill_job;

static void fill_item(const void *job, int item) {
    const fill_job *j = job;
    input_fill(j->in, j->tokens ? j->tokens[item] : item);
}

void input_make(input *in, moert_pool *pool, void *room, const int32_t *tokens, int n) {
    input_place(in, room);
    if (in->count) run_items(pool, fill_item, &(fill_job){in, tokens}, n, (int64_t)n * in->cols);
}

void multiply(const input *in, const moert_matrix *w, const int32_t *tokens, int n, int first, int stop, float *y,
              int64_t stride) {
    if (is_codes(w))
        in->isa->codes(w, &in->rounded[grouping(in, w)], tokens, n, first, stop, y, stride);
    else
        in->isa->floats(w, in->values, tokens, n, first, stop, y, stride);
}

static int64_t bytes_of_row(const moert_matrix *w) {
    if (!is_codes(w)) return (int64_t)w->cols * (w->kind == MOERT_F32 ? 4 : 2);
    return row_bytes(w->cols, w->kind) + 4 * (int64_t)groups_of(w->cols, w->group);
}

int64_t matrix_bytes(const moert_matrix *w) { return bytes_of_row(w) * w->rows; }

int item_rows(const moert_pool *pool, const moert_matrix *w, int n, int64_t bytes) {
    const int64_t share = bytes / (ITEMS_A_THREAD * pool_threads(pool));
    int64_t rows = (share < MOST_ITEM_BYTES ? share : MOST_ITEM_BYTES) / (bytes_of_row(w) + 1) / 4 * 4;
    if (n > 1) rows = MANY_ROWS_AN_ITEM;
    if (rows < 4) rows = 4;
    const int64_t items = (w->rows + rows - 1) / rows;
    return (int)((w->rows + items - 1) / items + 3) / 4 * 4; /* of one size, whole tiles */
}

static void product_item(const void *job, int item) {
    const products *all = job;
    LOCATE(i, item, all->products, all->count);
    const product *p = &all->products[i];
    const int first = item * p->block, stop = first + p->block < p->w->rows ? first + p->block : p->w->rows;
    multiply(p->in, p->w, p->tokens, p->n, first, stop, p->y + first, p->stride);
}

void run_products(moert_pool *pool, product *list, int count) {
    const products all = {list, count};
    int items = 0;
    int64_t bytes = 0, work = 0;
    for (int i = 0; i < count; i++) {
        bytes += list[i].n ? matrix_bytes(list[i].w) : 0;
        work += list[i].n * matrix_bytes(list[i].w);
    }
    for (int i = 0; i < count; i++) {
        product *p = &list[i];
        p->block = item_rows(pool, p->w, p->n, bytes);
        p->items = p->n ? (p->w->rows + p->block - 1) / p->block : 0;
        items += p->items;
    }
    run_items(pool, product_item, &all, items, work);
}

void run_items(moert_pool *pool, work run, const void *job, int n, int64_t amount) {
    if (amount < ALONE_BYTES)
        for (int item = 0; item < n; item++) run(job, item);
    else
        pool_run(pool, run, job, n);
}

int moert_linear(moert_pool *pool, int count, const moert_matrix *const *matrices, const float *x, int tokens,
                 float *const *outputs) {
    input in;
    if (!count) return 0;
    input_begin(&in, pool_operations(pool), x, tokens, matrices[0]->cols);
    for (int i = 0; i < count; i++)
        if (input_wants(&in, matrices[i])) return -1;
    const size_t list_bytes = aligned((size_t)count * sizeof(product));
    char *room = pool_scratch(pool, list_bytes + input_bytes(&in));
    if (!room) return -1;
    input_make(&in, pool, room + list_bytes, NULL, tokens);
    product *list = (product *)room;
    for (int i = 0; i < count; i++)
        list[i] = (product){&in, matrices[i], outputs[i], matrices[i]->rows, NULL, tokens, 0, 0};
    run_products(pool, list, count);
    return 0;
}

typedef struct {
    const operations *isa;
    const moert_matrix *w;
    const int64_t *rows;
    float *out;
} rows_job;

static void row_item(const void *job, int item) {
    const rows_job *j = job;
    j->isa->row(j->w, j->rows[item], j->out + (int64_t)item * j->w->cols);
}

int moert_rows(moert_pool *pool, const moert_matrix *matrix, int count, const int64_t *rows, float *out) {
    const rows_job job = {pool_operations(pool), matrix, rows, out};
    run_items(pool, row_item, &job, count, 4LL * count * matrix->cols);
    return 0;
}
