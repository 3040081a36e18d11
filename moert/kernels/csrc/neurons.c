/* Feed-forwards whose neurons lie in blocks: what they have for tokens, and the sum of the columns of those that fired. */
#include <string.h>

#include "expansion.h"

#define COLUMNS_OF_FEW 4   /* that are floats at one time, for tokens that share all they read */
#define COLUMNS_OF_MANY 48 /* for more tokens, which take turns: measured */
#define FEW_NUMBERS 128    /* of a column, the least that makes an item */
#define MANY_NUMBERS 256   /* and how many make one for more tokens */
#define LOOK_PARTS 16      /* of the tokens, in which neurons that fired are looked for */

/* From where on none is skipped of the neurons that one of all tokens fires: to skip some takes turns token by token. */
#define MOST_FIRE(each, all) (2 * (each) > (all))

static const void *further(const void *base, int64_t bytes) { return (const char *)base + bytes; }

/* One of the matrices whose blocks lie at[k] bytes behind base. */
static moert_matrix in_blocks(const moert_place *place, const moert_neurons *n, const void *base, const int64_t *at) {
    moert_matrix w = {.data = further(base, place->data), .kind = place->kind, .rows = n->d_ff, .cols = n->d_model};
    w.group = place->group, w.power = place->power, w.block_rows = n->block_rows, w.blocks = at;
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
    const moert_pool *pool;
    const operations *isa;
    moert_matrix down;
    const float *hidden, *bias;
    float *y;
    int tokens;
    uint8_t *any;      /* [LOOK_PARTS, d_ff]: does one of the part's tokens fire the neuron */
    int32_t *neurons;  /* [count]: those that one of all tokens fires */
    int count;
    int64_t *starts;   /* [tokens + 1]: where in `lists` that of each token begins */
    fired *lists;      /* NULL: each token is taken to fire all of them */
    int each, numbers; /* columns that are floats at one time, and numbers of a column that make an item */
} projection;

static int part_tokens(const projection *p) { return pieces(p->tokens, LOOK_PARTS); }

/* Some of the tokens: what any of them fires, and how much each of them. */
static void look_item(const void *job, int part, void *own) {
    const projection *p = job;
    const int n = p->down.rows, size = part_tokens(p);
    uint8_t *any = p->any + (int64_t)part * n;
    (void)own;
    memset(any, 0, (size_t)n);
    for (int t = part * size; t < part * size + piece(p->tokens, size, part); t++) {
        const float *hidden = p->hidden + (int64_t)t * n;
        int count = 0;
        for (int i = 0; i < n; i++) any[i] |= hidden[i] != 0;
        for (int i = 0; i < n; i++) count += hidden[i] != 0;
        p->starts[t + 1] = count + 1;
    }
}

/* The neurons that fired; 1 if one of them is not there. */
static int find_fired(projection *p) {
    const int n = p->down.rows, parts = pieces(p->tokens, part_tokens(p));
    for (int part = 1; part < parts; part++)
        for (int i = 0; i < n; i++) p->any[i] |= p->any[(int64_t)part * n + i];
    p->count = 0;
    for (int i = 0; i < n; i++) {
        const int any = p->any[i];
        p->neurons[p->count] = i;
        p->count += any;
        if (any && p->down.blocks[i / p->down.block_rows] < 0) return 1;
    }
    p->starts[0] = 0;
    for (int t = 0; t < p->tokens; t++) p->starts[t + 1] += p->starts[t];
    return 0;
}

static void list_item(const void *job, int token, void *own) {
    const projection *p = job;
    const float *hidden = p->hidden + (int64_t)token * p->down.rows;
    fired *to = p->lists + p->starts[token];
    (void)own;
    for (int k = 0; k < p->count; k++)
        if (hidden[p->neurons[k]] != 0) *to++ = (fired){k, hidden[p->neurons[k]]};
    *to = (fired){INT32_MAX, 0};
}

/* About so many numbers, which are needed soon; nobody else can know which. */
static void ask_for(const float *x, int n) {
    for (int i = 0; i < n; i += 16) __builtin_prefetch(x + i);
}

/* Numbers first .. first + n - 1 of some columns, times what all tokens have for them. `at`: where each token is in its list. */
static void sum_part(const projection *p, int from, int count, int first, int n, float *columns, int64_t *at) {
    const int rows = p->down.rows, cols = p->down.cols, next = from + count < p->count ? from + count : from;
    const column_set set = {p->neurons + from, columns, p->numbers < COLUMN_PART ? p->numbers : COLUMN_PART, count, from};
    for (int k = 0; k < count; k++) {
        const int ahead = from + k + p->each < p->count ? from + k + p->each : p->count - 1;
        p->isa->column(&p->down, p->neurons[from + k], first, n, p->neurons[ahead], columns + k * set.stride);
    }
    if (p->lists)
        for (int t = 0; t < p->tokens && !pool_stopped(p->pool); t++)
            at[t] += p->isa->sum_some(&set, p->lists + at[t], n, p->y + (int64_t)t * cols + first);
    else
        for (int t = 0; t < p->tokens && !pool_stopped(p->pool); t += SUM_TOKENS) {
            const int tokens = p->tokens - t < SUM_TOKENS ? p->tokens - t : SUM_TOKENS;
            for (int i = 0; i < tokens; i++) ask_for(p->hidden + (int64_t)(t + i) * rows + p->neurons[next], p->each);
            p->isa->sum_all(&set, tokens, p->hidden + (int64_t)t * rows, rows, n, p->y + (int64_t)t * cols + first, cols);
        }
}

static size_t columns_bytes(const projection *p) {
    return (size_t)p->each * (size_t)(p->numbers < COLUMN_PART ? p->numbers : COLUMN_PART) * sizeof(float);
}

/* In memory of the thread's own: columns, and behind them where each token is in its list. */
static void project_item(const void *job, int item, void *own) {
    const projection *p = job;
    const int cols = p->down.cols, begin = item * p->numbers, all = piece(cols, p->numbers, item);
    int64_t *at = (int64_t *)((char *)own + columns_bytes(p));
    for (int first = begin; first < begin + all; first += COLUMN_PART) {
        const int n = piece(all, COLUMN_PART, (first - begin) / COLUMN_PART);
        for (int t = 0; t < p->tokens; t++) memset(p->y + (int64_t)t * cols + first, 0, (size_t)n * sizeof *p->y);
        if (p->lists) memcpy(at, p->starts, (size_t)p->tokens * sizeof *at);
        for (int from = 0; from < p->count; from += p->each)
            sum_part(p, from, piece(p->count, p->each, from / p->each), first, n, own, at);
    }
    for (int t = 0; t < p->tokens; t++) {
        scale_by(p->down.power, p->y + (int64_t)t * cols + begin, all);
        for (int i = begin; i < begin + all; i++) { /* what was so small that -0 is left of it becomes 0 */
            float *y = p->y + (int64_t)t * cols + i;
            *y = *y + 0.0f;
            if (p->bias) *y += p->bias[i];
        }
    }
}

/* Few tokens: each thread reads a part of every column, as long as there is enough of it. More: parts so small that many
 * columns of them stay in the nearest cache while tokens take turns. */
static void divide(projection *p, const moert_pool *pool) {
    const int cols = p->down.cols, threads = pool_threads(pool), few = p->tokens <= SUM_TOKENS;
    const int share = pieces(pieces(cols, threads), FEW_NUMBERS) * FEW_NUMBERS;
    p->each = few ? COLUMNS_OF_FEW : COLUMNS_OF_MANY;
    p->numbers = few ? share : MANY_NUMBERS;
}

/* For each token what it fires, if that is less than most; 0, or -1 if memory ran out. */
static int make_lists(projection *p, moert_pool *pool) {
    const int64_t all = p->starts[p->tokens];
    if (MOST_FIRE(all - p->tokens, (int64_t)p->tokens * p->count)) return 0;
    p->lists = pool_scratch(pool, (size_t)all * sizeof *p->lists);
    if (!p->lists) return -1;
    run_items(pool, list_item, p, p->tokens, (int64_t)p->tokens * p->count);
    return 0;
}

int moert_project(moert_pool *pool, const moert_neurons *neurons, const void *base, const int64_t *at, const float *hidden,
                  int tokens, const float *bias, float *y) {
    const size_t n = (size_t)neurons->d_ff, start_bytes = aligned(((size_t)tokens + 1) * sizeof(int64_t));
    projection p = {.pool = pool, .isa = pool_operations(pool), .down = in_blocks(&neurons->down, neurons, base, at), .hidden = hidden};
    char *room = pool_lists(pool, start_bytes + aligned(n * sizeof(int32_t)) + LOOK_PARTS * n);
    if (!room) return -1;
    if (!tokens) return 0;
    p.bias = bias, p.y = y, p.tokens = tokens, p.starts = (int64_t *)room;
    p.neurons = (int32_t *)(room + start_bytes), p.any = (uint8_t *)p.neurons + aligned(n * sizeof(int32_t));
    run_items(pool, look_item, &p, pieces(tokens, part_tokens(&p)), (int64_t)tokens * neurons->d_ff);
    if (pool_stopped(pool)) return 0; /* nobody has looked */
    if (find_fired(&p)) return 1;
    divide(&p, pool);
    if (make_lists(&p, pool) || pool_own(pool, columns_bytes(&p) + (size_t)tokens * sizeof(int64_t))) return -1;
    run_items(pool, project_item, &p, pieces(p.down.cols, p.numbers),
              tokens * (int64_t)p.count * (matrix_bytes(&p.down) / p.down.rows));
    return 0;
}
