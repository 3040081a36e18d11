/* Who computes which expert of a layer: what moert/beside/gpu/placement.py says, number by number the same. */
#include "moert.h"

enum { HOST, HELD, COPIED };
enum { IN_MEMORY = 1, ON_DEVICE = 2 };

typedef struct {
    double host, device, copy, read;
} costs;

/* The experts of a layer: what each costs, where it lies, who computes it. */
typedef struct {
    const moert_placing *with;
    const costs *of;
    const int32_t *where;
    uint8_t *who;
    int n;
} layer;

static double larger(double a, double b) { return a > b ? a : b; }

static uint8_t on_device(int32_t at) { return at & ON_DEVICE ? HELD : COPIED; }

static costs costs_of(const moert_placing *with, int32_t count, int32_t kind, int32_t at) {
    const double *table = with->kinds + (int64_t)kind * MOERT_PLACING_KIND;
    costs found = {with->host_call_s, with->launch_s + count * with->row_s, 0, 0};
    for (int p = 0; p < 3; p++, table += 4) {
        found.host += larger(table[0], count * table[1]);
        found.device += larger(table[2], count * table[3]);
    }
    if (!(at & ON_DEVICE)) found.copy = table[0];
    if (!at) found.read = table[1];
    return found;
}

/* How long it takes, and in `copied` how long all copies do. */
static double seconds(const layer *l, double *copied) {
    double device = l->with->device_s, copy = l->with->copy_s, read = l->with->read_s, host = 0, copies = 0, begun = 0;
    int used = 0, drive = 0;
    for (int e = 0; e < l->n; e++) {
        const costs *of = &l->of[e];
        drive |= !l->where[e];
        if (l->who[e] != HOST) begun += l->with->launch_s + of->copy;
        if (l->who[e] == HELD)
            device += of->device, used = 1;
        else if (l->who[e] == COPIED)
            copies += of->copy, used = 1;
        else if (l->where[e])
            host += of->host;
    }
    for (int on_drive = 0; on_drive <= drive && copies > 0; on_drive++)
        for (int e = 0; e < l->n; e++)
            if (l->who[e] == COPIED && (l->where[e] == 0) == on_drive) {
                read += l->of[e].read;
                copy = larger(copy, on_drive ? read : 0) + l->of[e].copy;
                device = larger(device, copy) + l->of[e].device;
            }
    if (l->with->by_caller) host += begun;
    for (int e = 0; drive && e < l->n; e++)
        if (l->who[e] == HOST && !l->where[e]) {
            read += l->of[e].read;
            host = larger(host, read) + l->of[e].host;
        }
    *copied = copies;
    return used ? larger(host, device + l->with->pass_s) : host;
}

static double judged(const layer *l) {
    double copied, taken = seconds(l, &copied);
    return taken + l->with->reluctance * copied;
}

/* Leaves the best of all ways in `who`. */
static void try_all(layer *l, const int32_t *movable, int n) {
    double best_s = 0;
    int best = -1;
    for (int way = 0; way < 1 << n; way++) {
        for (int bit = 0; bit < n; bit++) l->who[movable[bit]] = way >> bit & 1 ? on_device(l->where[movable[bit]]) : HOST;
        const double taken = judged(l);
        if (best < 0 || taken < best_s) best = way, best_s = taken;
    }
    for (int bit = 0; bit < n; bit++) l->who[movable[bit]] = best >> bit & 1 ? on_device(l->where[movable[bit]]) : HOST;
}

static int before(const double *ratio, int32_t a, int32_t b) {
    return ratio[a] != ratio[b] ? ratio[a] > ratio[b] : a < b;
}

/* By what the processor is spared for each second of the busier stream, the most first; `ratio` by expert. */
static void sort(const layer *l, int32_t *movable, int n, double *ratio) {
    for (int i = 0; i < n; i++) {
        const costs of = l->of[movable[i]];
        ratio[movable[i]] = of.host / larger(of.device, of.copy);
    }
    for (int gap = n / 2 | 1;; gap = gap / 2 | 1) {
        for (int i = gap; i < n; i++) {
            const int32_t place = movable[i];
            int at = i;
            for (; at >= gap && before(ratio, place, movable[at - gap]); at -= gap) movable[at] = movable[at - gap];
            movable[at] = place;
        }
        if (gap == 1) return;
    }
}

/* The first `count` on the device, the others on the processor. */
static double divided(layer *l, const int32_t *order, int n, int count) {
    for (int i = 0; i < n; i++) l->who[order[i]] = i < count ? on_device(l->where[order[i]]) : HOST;
    return judged(l);
}

static void split(layer *l, int32_t *order, int n, int few, double *ratio) {
    sort(l, order, n, ratio);
    int least = 1, most = n;
    while (least < most) {
        const int middle = (least + most) / 2;
        if (divided(l, order, n, middle) <= divided(l, order, n, middle + 1))
            most = middle;
        else
            least = middle + 1;
    }
    double best_s = divided(l, order, n, 0);
    const double taken = divided(l, order, n, least);
    if (taken < best_s)
        best_s = taken;
    else
        divided(l, order, n, 0);
    if (n > few) return;
    for (int i = 0; i < n; i++) {
        const uint8_t before = l->who[order[i]];
        l->who[order[i]] = before == HOST ? on_device(l->where[order[i]]) : HOST;
        const double taken = judged(l);
        if (taken < best_s)
            best_s = taken;
        else
            l->who[order[i]] = before;
    }
}

double moert_assign(const moert_placing *with, int n, const int32_t *given, uint8_t *who, double *scratch) {
    const int32_t *counts = given, *kinds = given + n, *where = given + 2 * n;
    costs *of = (costs *)scratch;
    int32_t *movable = (int32_t *)(scratch + 4 * (int64_t)n);
    layer l = {with, of, where, who, n};
    int free = 0;
    for (int e = 0; e < n; e++) {
        of[e] = costs_of(with, counts[e], kinds[e], where[e]);
        who[e] = where[e] & ON_DEVICE ? HELD : with->rule == MOERT_ALL_COPIED ? COPIED : HOST;
        if (where[e] != ON_DEVICE) movable[free++] = e;
    }
    if (with->rule == MOERT_CHEAPEST) {
        if (free <= with->tried)
            try_all(&l, movable, free);
        else
            split(&l, movable, free, 4 * with->tried, scratch + 5 * (int64_t)n);
    }
    double copied;
    return seconds(&l, &copied);
}
