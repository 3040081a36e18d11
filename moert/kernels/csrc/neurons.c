/* Feed-forwards whose neurons lie in blocks: what they have for tokens, and the sum of the columns of those that fired. */
#include <string.h>

#include "expansion.h"

#define COLUMNS_OF_FEW 4   /* that are floats at one time, for tokens that share all they read */
#define COLUMNS_OF_MANY 64 /* for more tokens, which take turns */
#define FEW_NUMBERS 128    /* of a column, the least that makes an item */
#define MANY_NUMBERS 256

static const void *further(const void *base, int64_t bytes) { return (const char *)base + bytes; }

/* One of the matrices whose blocks lie at[k] bytes behind base. */
static moert_matrix in_blocks(const moert_place *place, const moert_neurons *n, const void *base, const int64_t *at) {
    moert_matrix w = {.data = further(base, place->data), .kind = place->kind, .rows = n->d_ff, .cols = n->d_model};
    w.group = place->group, w.block_rows = n->block_rows, w.blocks = at;
    if (is_codes(&w)) w.scale = further(base, place->scale), w.minimum = further(base, place->minimum);
    if (place->bias >= 0) w.bias = further(base, place->bias);
    return w;
}

int moert_fire(moert_pool *pool, const moert_neurons *neurons, const moert_act *act, const void *base, const int64_t *at,
               const float *x, int tokens, float *hidden) {
    moert_ffn ffn = {.up = in_blocks(&neurons->up, neurons, base, at)};
    input in;
    columns all;
    if (!tokens) return 0;
    if (neurons->gate.kind) ffn.gate = in_blocks(&neurons->gate, neurons, base, at);
    input_begin(&in, pool_operations(pool), x, tokens, neurons->d_model);
    columns_begin(&all, &in, NULL, tokens);
    if (ffn.gate.data && input_wants(&in, &all, &ffn.gate)) return -1;
    if (input_wants(&in, &all, &ffn.up)) return -1;
    void *room = pool_scratch(pool, input_bytes(&in, &all, 1) + 1); /* floats need none */
    if (!room) return -1;
    input_make(&in, &all, 1, pool, room, NULL, tokens);
    return expand(pool, &(expansion){&all, &ffn, hidden, act, 0, 0}, 1);
}

typedef struct {
    const operations *isa;
    moert_matrix down;
    const float *hidden, *bias;
    float *y;
    int tokens;
    uint8_t *any;   /* [tiles, d_ff]: does one of its tokens fire the neuron */
    int32_t *fired; /* [count]: neurons that one of all tokens fires */
    int count;
    int each, numbers; /* columns that are floats at one time, and numbers of a column that make an item */
} projection;

static int tiles_of(int tokens) { return pieces(tokens, SUM_TOKENS); }

static void any_item(const void *job, int tile, void *own) {
    const projection *p = job;
    const int n = p->down.rows;
    uint8_t *any = p->any + (int64_t)tile * n;
    (void)own;
    memset(any, 0, (size_t)n);
    for (int t = 0; t < piece(p->tokens, SUM_TOKENS, tile); t++) {
        const float *hidden = p->hidden + ((int64_t)tile * SUM_TOKENS + t) * n;
        for (int i = 0; i < n; i++) any[i] |= hidden[i] != 0;
    }
}

/* Lists the neurons that fired; 1 if one of them is not there. */
static int list_fired(projection *p) {
    const int n = p->down.rows, tiles = tiles_of(p->tokens);
    p->count = 0;
    for (int i = 0; i < n; i++) {
        int any = 0;
        for (int tile = 0; tile < tiles && !any; tile++) any = p->any[(int64_t)tile * n + i];
        p->fired[p->count] = i;
        p->count += any;
        if (any && p->down.blocks[i / p->down.block_rows] < 0) return 1;
    }
    return 0;
}

/* Those of `count` neurons that a tile's tokens fire; NULL for all of them. */
static const int32_t *places_of_tile(const projection *p, const int32_t *neurons, int tile, int *count, int32_t *room) {
    const uint8_t *any = p->any + (int64_t)tile * p->down.rows;
    int n = 0;
    if (tiles_of(p->tokens) == 1) return NULL;
    if (neurons[*count - 1] - neurons[0] == *count - 1 && !memchr(any + neurons[0], 0, (size_t)*count)) return NULL;
    for (int k = 0; k < *count; k++) {
        room[n] = k;
        n += any[neurons[k]];
    }
    *count = n;
    return room;
}

/* Numbers first .. first + n - 1 of some columns, times what all tokens have for them. */
static void sum_part(const projection *p, int from, int count, int first, int n, float *columns) {
    int32_t places[COLUMNS_OF_MANY];
    fired_columns f = {p->fired + from, columns, p->numbers < COLUMN_PART ? p->numbers : COLUMN_PART, NULL, 0};
    for (int k = 0; k < count; k++) {
        const int ahead = from + k + p->each < p->count ? from + k + p->each : p->count - 1;
        p->isa->column(&p->down, p->fired[from + k], first, n, p->fired[ahead], columns + k * f.stride);
    }
    for (int t = 0; t < p->tokens; t += SUM_TOKENS) {
        f.count = count;
        f.places = places_of_tile(p, f.neurons, t / SUM_TOKENS, &f.count, places);
        p->isa->sum_columns(&f, p->tokens - t < SUM_TOKENS ? p->tokens - t : SUM_TOKENS, p->hidden + (int64_t)t * p->down.rows,
                      p->down.rows, n, p->y + (int64_t)t * p->down.cols + first, p->down.cols);
    }
}

static void project_item(const void *job, int item, void *own) {
    const projection *p = job;
    const int cols = p->down.cols, begin = item * p->numbers, n = piece(cols, p->numbers, item);
    for (int t = 0; t < p->tokens; t++) memset(p->y + (int64_t)t * cols + begin, 0, (size_t)n * sizeof *p->y);
    for (int from = 0; from < p->count; from += p->each)
        for (int at = 0; at < n; at += COLUMN_PART)
            sum_part(p, from, piece(p->count, p->each, from / p->each), begin + at, piece(n, COLUMN_PART, at / COLUMN_PART), own);
    for (int t = 0; t < p->tokens; t++)
        for (int i = begin; i < begin + n; i++) { /* what was so small that -0 is left of it becomes 0 */
            float *y = p->y + (int64_t)t * cols + i;
            *y = *y + 0.0f;
            if (p->bias) *y += p->bias[i];
        }
}

/* Few tokens: each thread reads a part of every column, as long as there is enough of it. More: parts so small that many
 * columns of them stay in the nearest caches while tokens take turns. */
static void divide(projection *p, const moert_pool *pool) {
    const int cols = p->down.cols, threads = pool_threads(pool), few = p->tokens <= SUM_TOKENS;
    const int share = pieces(pieces(cols, threads), FEW_NUMBERS) * FEW_NUMBERS;
    p->each = few ? COLUMNS_OF_FEW : COLUMNS_OF_MANY;
    p->numbers = few ? share : pieces(cols, MANY_NUMBERS) < 4 * threads ? FEW_NUMBERS : MANY_NUMBERS;
}

int moert_project(moert_pool *pool, const moert_neurons *neurons, const void *base, const int64_t *at, const float *hidden,
                  int tokens, const float *bias, float *y) {
    const size_t n = (size_t)neurons->d_ff, any_bytes = aligned((size_t)tiles_of(tokens) * n);
    char *room = pool_lists(pool, any_bytes + n * sizeof(int32_t));
    if (!room) return -1;
    projection p = {.isa = pool_operations(pool), .down = in_blocks(&neurons->down, neurons, base, at), .hidden = hidden};
    p.bias = bias, p.y = y, p.tokens = tokens, p.any = (uint8_t *)room, p.fired = (int32_t *)(room + any_bytes);
    run_items(pool, any_item, &p, tiles_of(tokens), (int64_t)tokens * neurons->d_ff);
    if (list_fired(&p)) return 1;
    divide(&p, pool);
    const int widest = p.numbers < COLUMN_PART ? p.numbers : COLUMN_PART;
    if (pool_own(pool, (size_t)p.each * (size_t)widest * sizeof(float))) return -1;
    run_items(pool, project_item, &p, pieces(p.down.cols, p.numbers),
              tokens * (int64_t)p.count * (matrix_bytes(&p.down) / p.down.rows));
    return 0;
}
