/* Matrices times activations, cut into items for the pool. */
#include <string.h>

#include "products.h"

#define MOST_ITEM_BYTES (256 << 10) /* of weights: what is asked for ahead at an item's end is lost to its thread */
#define ITEMS_A_THREAD 4            /* at least, where there is enough: so that threads end together */
#define ALONE_BYTES (128 << 10)     /* below this, waking others costs more than they save */
#define MANY_ROWS_AN_ITEM 32        /* for many tokens, when arithmetic counts and not bytes */
#define MOST_TOKENS 2048            /* of a product at one time, so that an item is soon done */

void input_begin(input *in, const operations *isa, const float *values, int tokens, int cols) {
    *in = (input){.isa = isa, .values = values, .tokens = tokens, .cols = cols};
}

void columns_begin(columns *x, const input *in, const int32_t *tokens, int n) {
    *x = (columns){.in = in, .tokens = tokens, .n = n};
}

static int grouping(const input *in, const moert_matrix *w) {
    int i = 0;
    const int turned = step_of(w) > 0;
    while (i < in->count && (in->rounded[i].group != w->group || (in->orders[i] >> TURNED & 1) != turned)) i++;
    return i;
}

/* Whether columns are multiplied with a matrix strip by strip. */
static int many(const columns *x, const moert_matrix *w) {
    return is_codes(w) && x->n >= x->in->isa->many[w->kind < 0 ? 0 : w->kind] && whole_blocks(w->cols, w->group);
}

int input_wants(input *in, columns *x, const moert_matrix *w) {
    if (!is_codes(w)) return 0;
    int i = grouping(in, w);
    if (i == MOST_GROUPINGS) return -1;
    if (i == in->count) {
        in->rounded[in->count++].group = w->group;
        if (step_of(w)) in->orders[i] |= 1 << TURNED;
    }
    if (many(x, w)) x->of[i].n = x->n;
    else in->orders[i] |= 1 << order_of(w->kind);
    return 0;
}

static size_t rounded_bytes(const input *in, int i) {
    return in->isa->operand_bytes(in->tokens, in->cols, in->rounded[i].group, in->orders[i]);
}

/* Gives panels their place, as much as they have tokens; returns what they take. */
static size_t place_panels(panels *p, const operand *x, char *room) {
    const size_t tokens = (size_t)panels_of(p->n) * PANEL, places = (size_t)places_of(x->cols, x->block);
    const size_t bytes = tokens * places * (size_t)x->block, blocks = tokens * places * 4, sums = tokens * (size_t)x->groups * 4;
    p->x = x;
    p->bytes = (int8_t *)room;
    p->blocks = (float *)(room + bytes);
    p->sums = (float *)(room + bytes + blocks);
    return bytes + blocks + sums;
}

size_t input_bytes(const input *in, const columns *x, int count) {
    size_t bytes = 0;
    for (int i = 0; i < in->count; i++) {
        operand shape;
        panels sized;
        in->isa->operand_place(&shape, NULL, in->tokens, in->cols, in->rounded[i].group, 0);
        bytes += rounded_bytes(in, i);
        for (int c = 0; c < count; c++) {
            sized.n = x[c].of[i].n;
            bytes += place_panels(&sized, &shape, NULL);
        }
    }
    return bytes;
}

typedef struct {
    const input *in;
    const int32_t *tokens;
} fill_job;

static void fill_item(const void *job, int item, void *own) {
    const fill_job *j = job;
    const int token = j->tokens ? j->tokens[item] : item;
    (void)own;
    for (int i = 0; i < j->in->count; i++)
        j->in->isa->operand_fill(&j->in->rounded[i], token, j->in->values + (int64_t)token * j->in->cols);
}

typedef struct {
    const columns *columns;
    int count;
} panel_job;

static void panel_item(const void *job, int item, void *own) {
    const panel_job *j = job;
    (void)own;
    LOCATE(c, item, j->columns, j->count);
    const columns *x = &j->columns[c];
    int i = 0;
    while (item >= panels_of(x->of[i].n)) item -= panels_of(x->of[i++].n);
    x->in->isa->panel(&x->of[i], item, x->tokens);
}

void input_make(input *in, columns *x, int count, moert_pool *pool, void *room, const int32_t *tokens, int n) {
    char *at = room;
    int items = 0;
    for (int i = 0; i < in->count; i++) {
        in->isa->operand_place(&in->rounded[i], at, in->tokens, in->cols, in->rounded[i].group, in->orders[i]);
        at += rounded_bytes(in, i);
    }
    for (int c = 0; c < count; c++, items += x[c - 1].items) {
        x[c].items = 0;
        for (int i = 0; i < in->count; i++) {
            at += place_panels(&x[c].of[i], &in->rounded[i], at);
            x[c].items += panels_of(x[c].of[i].n);
        }
    }
    if (in->count) run_items(pool, fill_item, &(fill_job){in, tokens}, n, (int64_t)n * in->cols);
    if (items) run_items(pool, panel_item, &(panel_job){x, count}, items, (int64_t)items * PANEL * in->cols);
}

static size_t codes_bytes(int cols, int block) { return STRIP * (size_t)(places_of(cols, block) * block); }

size_t multiply_bytes(const columns *x, const moert_matrix *w) {
    const size_t scales = STRIP * (size_t)strip_stride(w->cols, w->group) * sizeof(float);
    return many(x, w) ? codes_bytes(w->cols, block_of(w->cols, w->group)) + 2 * scales : 0;
}

static void multiply_strips(const panels *p, const moert_matrix *w, const operations *isa, int first, int stop, float *y,
                            int64_t stride, void *own) {
    strip s = {.bits = step_of(w) ? 8 : w->kind, .cols = w->cols, .block = p->x->block, .codes = own, .stride = strip_stride(w->cols, w->group)};
    s.scale = (float *)(s.codes + codes_bytes(w->cols, s.block));
    s.minimum = s.scale + STRIP * s.stride;
    for (int row = first; row < stop; row += STRIP) {
        s.rows = stop - row < STRIP ? stop - row : STRIP;
        isa->unpack(w, row, &s);
        isa->strips(&s, p, y + row - first, stride);
    }
}

static float bias_of(const moert_matrix *w, int64_t row) {
    const int64_t on = find_block(w, &row);
    return ((const float *)(const void *)((const char *)w->bias + on))[row];
}

static int64_t bytes_of_row(const moert_matrix *w) {
    if (!is_codes(w)) return (int64_t)w->cols * (w->kind == MOERT_F32 ? 4 : 2);
    if (step_of(w)) return ((int64_t)w->cols * step_of(w) + 15) / 16 + 2;
    return row_bytes(w->cols, w->kind) + (w->kind == MOERT_MXFP4 ? 1 : 4) * (int64_t)groups_of(w->cols, w->group);
}

/* Of rows that are all there. */
static void multiply_rows(const columns *x, const moert_matrix *w, int first, int stop, float *y, int64_t stride, void *own) {
    const input *in = x->in;
    if (!is_codes(w)) in->isa->floats(w, in->values, x->tokens, x->n, first, stop, y, stride);
    else if (many(x, w)) multiply_strips(&x->of[grouping(in, w)], w, in->isa, first, stop, y, stride, own);
    else in->isa->codes(w, &in->rounded[grouping(in, w)], x->tokens, x->n, first, stop, y, stride);
    for (int t = 0; t < x->n && w->power; t++) scale_by(w->power, y + t * stride, stop - first);
    if (!w->bias) return;
    for (int t = 0; t < x->n; t++)
        for (int row = first; row < stop; row++) y[t * stride + row - first] += bias_of(w, row);
}

static int is_there(const moert_matrix *w, int row) { return !w->blocks || w->blocks[row / w->block_rows] >= 0; }

void multiply(const columns *x, const moert_matrix *w, int first, int stop, float *y, int64_t stride, void *own) {
    for (int row = first, next; row < stop; row = next) {
        const int there = is_there(w, row);
        float *to = y + row - first;
        next = w->blocks ? row : stop;
        while (next < stop && is_there(w, next) == there) next = (next / w->block_rows + 1) * w->block_rows;
        next = next < stop ? next : stop;
        if (there) multiply_rows(x, w, row, next, to, stride, own);
        for (int t = 0; t < x->n && !there; t++) memset(to + t * stride, 0, (size_t)(next - row) * sizeof *to);
    }
}

int64_t matrix_bytes(const moert_matrix *w) { return bytes_of_row(w) * w->rows; }

int item_rows(const moert_pool *pool, const moert_matrix *w, int all, int n, int64_t bytes) {
    const int64_t share = bytes / (ITEMS_A_THREAD * pool_threads(pool));
    int64_t rows = (share < MOST_ITEM_BYTES ? share : MOST_ITEM_BYTES) / (bytes_of_row(w) + 1) / 4 * 4;
    const int tile = step_of(w) ? TRELLIS_PART : n > 1 ? MANY_ROWS_AN_ITEM : 4;
    if (n > 1) rows = MANY_ROWS_AN_ITEM;
    if (rows < tile) rows = tile;
    const int64_t items = (all + rows - 1) / rows;
    return (int)((all + items - 1) / items + tile - 1) / tile * tile; /* of one size, whole tiles */
}

static void product_item(const void *job, int item, void *own) {
    const products *all = job;
    LOCATE(i, item, all->products, all->count);
    const product *p = &all->products[i];
    const int first = item * p->block, stop = first + p->block < p->rows ? first + p->block : p->rows;
    multiply(p->x, p->w, p->first + first, p->first + stop, p->y + first, p->stride, own);
}

int run_products(moert_pool *pool, product *list, int count) {
    const products all = {list, count};
    int items = 0;
    int64_t bytes = 0, work = 0;
    size_t own = 0;
    for (int i = 0; i < count; i++) {
        list[i].rows = list[i].rows ? list[i].rows : list[i].w->rows;
        const int64_t each = bytes_of_row(list[i].w) * list[i].rows;
        const size_t room = multiply_bytes(list[i].x, list[i].w);
        bytes += list[i].x->n ? each : 0;
        work += list[i].x->n * each;
        own = room > own ? room : own;
    }
    if (pool_own(pool, own)) return -1;
    for (int i = 0; i < count; i++) {
        product *p = &list[i];
        p->block = item_rows(pool, p->w, p->rows, p->x->n, bytes);
        p->items = p->x->n ? (p->rows + p->block - 1) / p->block : 0;
        items += p->items;
    }
    run_items(pool, product_item, &all, items, work);
    return 0;
}

void run_items(moert_pool *pool, work run, const void *job, int n, int64_t amount) {
    pool_run(pool, run, job, n, amount < ALONE_BYTES);
}

/* Tokens first .. first + tokens - 1 of moert_linear. */
static int linear_some(moert_pool *pool, int count, const moert_matrix *const *matrices, const float *x, int64_t first,
                       int tokens, float *const *outputs) {
    input in;
    columns all;
    input_begin(&in, pool_operations(pool), x + first * matrices[0]->cols, tokens, matrices[0]->cols);
    columns_begin(&all, &in, NULL, tokens);
    for (int i = 0; i < count; i++)
        if (input_wants(&in, &all, matrices[i])) return -1;
    const size_t list_bytes = aligned((size_t)count * sizeof(product));
    char *room = pool_scratch(pool, list_bytes + input_bytes(&in, &all, 1));
    if (!room) return -1;
    input_make(&in, &all, 1, pool, room + list_bytes, NULL, tokens);
    product *list = (product *)room;
    for (int i = 0; i < count; i++)
        list[i] = (product){&all, matrices[i], outputs[i] + first * matrices[i]->rows, matrices[i]->rows, 0, 0, 0, 0};
    return run_products(pool, list, count);
}

int moert_linear(moert_pool *pool, int count, const moert_matrix *const *matrices, const float *x, int tokens,
                 float *const *outputs) {
    int failed = 0;
    for (int64_t first = 0; count && first < tokens && !failed; first += MOST_TOKENS)
        failed = linear_some(pool, count, matrices, x, first, piece(tokens - first, MOST_TOKENS, 0), outputs);
    return failed;
}

typedef struct {
    const operations *isa;
    const moert_matrix *w;
    const int64_t *rows;
    float *out;
} rows_job;

static void row_item(const void *job, int item, void *own) {
    const rows_job *j = job;
    (void)own;
    float *to = j->out + (int64_t)item * j->w->cols;
    j->isa->row(j->w, j->rows[item], to);
    scale_by(j->w->power, to, j->w->cols);
}

int moert_rows(moert_pool *pool, const moert_matrix *matrix, int count, const int64_t *rows, float *out) {
    const rows_job job = {pool_operations(pool), matrix, rows, out};
    run_items(pool, row_item, &job, count, 4LL * count * matrix->cols);
    return 0;
}
