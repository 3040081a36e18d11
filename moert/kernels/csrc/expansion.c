/* Gate and up of feed-forwards, and their activation, cut into items for the pool. */
#include "expansion.h"

typedef struct {
    const expansion *experts;
    int count;
} expansions;

static size_t gate_bytes(const moert_ffn *ffn, int n, int block) {
    return ffn->gate.data ? aligned((size_t)n * (size_t)block * sizeof(float)) : 0;
}

/* In memory of the thread's own: the gate [n, block], and behind it what the products need. */
static void expand_item(const void *job, int item, void *own) {
    const expansions *all = job;
    LOCATE(i, item, all->experts, all->count);
    const expansion *e = &all->experts[i];
    const moert_ffn *ffn = e->ffn;
    const int d_ff = ffn->up.rows, n = e->x->n;
    const int first = item * e->block, stop = first + e->block < d_ff ? first + e->block : d_ff, size = stop - first;
    float *gate = ffn->gate.data ? own : NULL, *up = e->hidden + first;
    void *room = (char *)own + gate_bytes(ffn, n, e->block);
    multiply(e->x, &ffn->up, first, stop, up, d_ff, room);
    if (gate) multiply(e->x, &ffn->gate, first, stop, gate, size, room);
    for (int t = 0; t < n; t++)
        e->x->in->isa->activate(e->act, gate ? gate + (int64_t)t * size : NULL, up + (int64_t)t * d_ff, size);
}

int expand(moert_pool *pool, expansion *list, int experts) {
    int items = 0;
    int64_t bytes = 0, work = 0;
    size_t own = 0;
    for (int e = 0; e < experts; e++) {
        const int64_t each = matrix_bytes(&list[e].ffn->up);
        bytes += list[e].x->n ? each : 0;
        work += 2 * list[e].x->n * each;
    }
    for (int e = 0; e < experts; e++) {
        expansion *x = &list[e];
        const moert_ffn *ffn = x->ffn;
        const int d_ff = ffn->up.rows, n = x->x->n;
        x->block = item_rows(pool, &ffn->up, ffn->up.rows, n, bytes);
        x->items = n ? (d_ff + x->block - 1) / x->block : 0;
        items += x->items;
        const size_t up = multiply_bytes(x->x, &ffn->up), gate = ffn->gate.data ? multiply_bytes(x->x, &ffn->gate) : 0;
        const size_t room = gate_bytes(ffn, n, x->block) + (up > gate ? up : gate);
        own = room > own ? room : own;
    }
    if (pool_own(pool, own)) return -1;
    run_items(pool, expand_item, &(expansions){list, experts}, items, work);
    return 0;
}
