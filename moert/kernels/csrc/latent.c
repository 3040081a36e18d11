/* Attention to latent features (DeepSeek-V2): the heads see them as they are kept; what would make keys and values of them
 * is applied to queries and to what is read instead. One token or many: each gets the same bits. */
#include "heads.h"

/* Rows of a matrix for each head, with an input of its own. */
typedef struct {
    input *in;
    columns *x;
    const moert_matrix *w;
    product *list;
    size_t bytes; /* of the inputs, rounded */
    int n;
} by_head;

static size_t list_bytes(int n) { return aligned((size_t)n * sizeof(product)); }

static size_t by_head_bytes(int n) {
    return aligned((size_t)n * sizeof(input)) + aligned((size_t)n * sizeof(columns)) + list_bytes(n);
}

/* Lists in `room` (by_head_bytes): each head has its share of the rows, and of inputs [n, tokens, cols] its own. 0, or -1. */
static int by_head_begin(by_head *b, char *room, const operations *isa, const moert_matrix *matrix, int n, int tokens) {
    b->n = n, b->bytes = 0, b->w = matrix;
    b->in = (input *)room;
    b->x = (columns *)(room += aligned((size_t)n * sizeof(input)));
    b->list = (product *)(room + aligned((size_t)n * sizeof(columns)));
    for (int h = 0; h < n; h++) {
        input_begin(&b->in[h], isa, NULL, tokens, matrix->cols);
        columns_begin(&b->x[h], &b->in[h], NULL, tokens);
        if (input_wants(&b->in[h], &b->x[h], matrix)) return -1;
        b->bytes += input_bytes(&b->in[h], &b->x[h], 1);
    }
    return 0;
}

/* out[token * stride + h * apart] = matrix h · values [n, tokens, cols]; 0, or -1. */
static int by_head_run(by_head *b, moert_pool *pool, char *room, const float *values, int tokens, float *out, int64_t stride,
                       int apart) {
    const int rows = b->w->rows / b->n;
    for (int h = 0; h < b->n; h++) {
        b->in[h].values = values + (int64_t)h * tokens * b->w->cols;
        input_make(&b->in[h], &b->x[h], 1, pool, room, NULL, tokens);
        room += input_bytes(&b->in[h], &b->x[h], 1);
        b->list[h] = (product){&b->x[h], b->w, out + (int64_t)h * apart, stride, 0, 0, h * rows, rows};
    }
    return run_products(pool, b->list, b->n);
}

/* A product with the activations [tokens, cols]; what they take once rounded is counted first. */
typedef struct {
    input in;
    columns x;
    size_t bytes;
} one_input;

static int wants(one_input *i, const moert_matrix *w) { return w->data ? input_wants(&i->in, &i->x, w) : 0; }

static void begin(one_input *i, const operations *isa, int tokens, int cols) {
    input_begin(&i->in, isa, NULL, tokens, cols);
    columns_begin(&i->x, &i->in, NULL, tokens);
}

static void make(one_input *i, moert_pool *pool, char *room, const float *values, int tokens) {
    i->in.values = values;
    input_make(&i->in, &i->x, 1, pool, room, NULL, tokens);
}

/* Queries of each head: their features that turn are the last of `dim`. */
typedef struct {
    const operations *isa;
    const moert_latent *block;
    const moert_keys *kept;
    const moert_positions *at;
    const float *turning;    /* [tokens, n, rope_dims] */
    float *queries, *latent; /* [tokens, n, dim], [tokens, dim] */
    int start;
} turn_job;

static void turn_item(const void *job, int token, void *own) {
    const turn_job *j = job;
    (void)own;
    const moert_latent *a = j->block;
    const int n = a->heads.n, dim = a->heads.dim, c = a->heads.value_dim, dims = a->rope_dims;
    const float *turn = j->at->turns ? j->at->turns + (int64_t)token * dims : NULL, *from = j->turning + (int64_t)token * n * dims;
    float *queries = j->queries + (int64_t)token * n * dim, *latent = j->latent + (int64_t)token * dim;
    for (int head = 0; head < n; head++) {
        float *to = queries + (int64_t)head * dim + c;
        for (int i = 0; i < dims; i++) to[i] = from[head * dims + i];
        if (turn) rotate(to, 1, dims, dims, turn);
    }
    if (j->at->query_scale)
        for (int i = 0; i < n * dim; i++) queries[i] *= j->at->query_scale[token];
    j->isa->norm(latent, &a->kv_norm, 1, c, latent);
    if (turn) rotate(latent + c, 1, dims, dims, turn);
    keep_heads(j->isa, &a->heads, latent, latent, j->start + token, j->kept);
}

typedef struct {
    const float *gate; /* [tokens, n] */
    float *read;       /* [tokens, n, v] */
    int n, v;
} gate_job;

static void gate_item(const void *job, int token, void *own) {
    const gate_job *j = job;
    const float *gate = j->gate + (int64_t)token * j->n;
    float *read = j->read + (int64_t)token * j->n * j->v;
    (void)own;
    for (int head = 0; head < j->n; head++, read += j->v)
        for (int i = 0; i < j->v; i++) read[i] *= gate[head];
}

int moert_attend_latent(moert_pool *pool, const moert_latent *a, int tokens, float *x, const moert_keys *kept, int start,
                        int length, const moert_positions *at) {
    const operations *isa = pool_operations(pool);
    const moert_heads *h = &a->heads;
    const int n = h->n, d_model = a->kv_a.cols, c = h->value_dim, dims = a->rope_dims, dim = h->dim;
    const int rank = a->q.cols, nope = a->keys.cols, v = a->values.rows / n, gated = a->gate.data != NULL;
    one_input hidden, low, out;
    by_head keys, values;
    begin(&hidden, isa, tokens, d_model), begin(&low, isa, tokens, rank), begin(&out, isa, tokens, n * v);
    one_input *asked = a->q_a.data ? &low : &hidden;
    char *lists = pool_lists(pool, 2 * by_head_bytes(n) + list_bytes(n));
    if (!lists || wants(&hidden, &a->q_a) || wants(&hidden, &a->kv_a) || wants(&hidden, &a->k_turn) || wants(asked, &a->q) ||
        wants(asked, &a->q_turn) || wants(&out, &a->o) || wants(&hidden, &a->gate))
        return -1;
    if (by_head_begin(&keys, lists, isa, &a->keys, n, tokens)) return -1;
    if (by_head_begin(&values, lists + by_head_bytes(n), isa, &a->values, n, tokens)) return -1;
    product *queries = (product *)(lists + 2 * by_head_bytes(n));

    const size_t each = (size_t)tokens * sizeof(float), heads = each * (size_t)n;
    const size_t sizes[] = {
        aligned(each * (size_t)d_model), aligned(each * (size_t)rank), aligned(heads * (size_t)nope), aligned(heads * (size_t)dims),
        aligned(heads * (size_t)dim), aligned(each * (size_t)dim), aligned(heads * (size_t)c), aligned(heads * (size_t)v),
        gated ? aligned(heads) : 0, gated ? aligned(heads) : 0,
    };
    enum { NORMED, LOW, STILL, TURNING, QUERIES, LATENT, MIXED, READ, GATE, GATES, ROOMS };
    size_t total = input_bytes(&hidden.in, &hidden.x, 1) + input_bytes(&low.in, &low.x, 1) + input_bytes(&out.in, &out.x, 1) +
                   keys.bytes + values.bytes;
    for (int i = 0; i < ROOMS; i++) total += sizes[i];
    char *room = pool_scratch(pool, total);
    if (!room) return -1;
    float *of[ROOMS];
    for (int i = 0; i < ROOMS; room += sizes[i++]) of[i] = (float *)room;

    moert_normalise(pool, &a->norm, tokens, d_model, x, of[NORMED]);
    make(&hidden, pool, room, of[NORMED], tokens);
    room += input_bytes(&hidden.in, &hidden.x, 1);
    if (a->q_a.data) {
        product down = {&hidden.x, &a->q_a, of[LOW], rank, 0, 0, 0, 0};
        if (run_products(pool, &down, 1)) return -1;
        moert_normalise(pool, &a->q_norm, tokens, rank, of[LOW], of[LOW]);
        make(&low, pool, room, of[LOW], tokens);
    }
    room += input_bytes(&low.in, &low.x, 1);
    product rest[4] = {
        {&hidden.x, &a->kv_a, of[LATENT], dim, 0, 0, 0, 0},
        {&hidden.x, &a->k_turn, of[LATENT] + c, dim, 0, 0, 0, 0},
        {&asked->x, &a->q_turn, of[TURNING], (int64_t)n * dims, 0, 0, 0, 0},
        {&hidden.x, &a->gate, of[GATE], n, 0, 0, 0, 0},
    };
    if (run_products(pool, rest, 3 + gated)) return -1;
    for (int head = 0; head < n; head++)
        queries[head] = (product){&asked->x, &a->q, of[STILL] + (int64_t)head * tokens * nope, nope, 0, 0, head * nope, nope};
    if (run_products(pool, queries, n)) return -1;
    if (by_head_run(&keys, pool, room, of[STILL], tokens, of[QUERIES], (int64_t)n * dim, dim)) return -1;
    room += keys.bytes;
    const turn_job turning = {isa, a, kept, at, of[TURNING], of[QUERIES], of[LATENT], start};
    run_items(pool, turn_item, &turning, tokens, 8LL * tokens * n * dims);

    heads_job job = {isa, h, kept, at, of[QUERIES], of[MIXED], (int64_t)n * dim, c, (int64_t)tokens * c, tokens, start, length, 0};
    run_heads(pool, &job);
    if (by_head_run(&values, pool, room, of[MIXED], tokens, of[READ], (int64_t)n * v, v)) return -1;
    room += values.bytes;
    if (gated) {
        moert_sigmoid(pool, (int64_t)tokens * n, of[GATE], of[GATES]);
        run_items(pool, gate_item, &(gate_job){of[GATES], of[READ], n, v}, tokens, (int64_t)tokens * n * v);
    }
    make(&out, pool, room, of[READ], tokens);
    product output = {&out.x, &a->o, of[NORMED], d_model, 0, 0, 0, 0};
    if (run_products(pool, &output, 1)) return -1;
    add_made(pool, &a->after, a->add, tokens, d_model, of[NORMED], x);
    return 0;
}
