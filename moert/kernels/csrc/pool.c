/* A few threads that share one job at a time. Items are handed out one by one from a counter, so a thread that the
 * system has put aside delays a job by the item it is at, and not at all between items. Threads wait for the next job
 * by looking for it a short while, then asleep: long spinning would take the core from whoever it waits for. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#ifdef _WIN32 /* its aligned memory has a function of its own to free it */
#include <malloc.h>
#define aligned_alloc(align, bytes) _aligned_malloc(bytes, align)
#define aligned_free _aligned_free
#else
#define aligned_free free
#endif

#include "internal.h"
#include "waiting.h"

#define IDLE_NS 200000  /* how long a thread looks for the next job before it sleeps */
#define FINISH_NS 20000 /* how long the caller looks for the end of a job before it sleeps */
#define KEPT_SCRATCH (4 << 20) /* more than this is given back when a long prompt is over */

/* The counter holds how many items the job has, and the next one, in one word, so that they are taken as one. */
#define TICKET(items) ((uint64_t)(items) << 32)
#define ITEMS(ticket) ((int64_t)((ticket) >> 32))
#define ITEM(ticket) ((int64_t)((ticket)&0xFFFFFFFF))

typedef struct {
    char *at;
    size_t bytes;
} room;

struct moert_pool {
    const operations *isa;
    int threads, started;
    room scratch, lists, own; /* own: [threads][own_bytes] */
    size_t own_bytes;
    atomic_int numbers;  /* of threads that have begun */
    pthread_t *workers;
    work run; /* the present job: it stays until all of its items are done */
    const void *job;
    _Alignas(64) atomic_uint_fast64_t ticket;
    _Alignas(64) atomic_int done;
    _Alignas(64) atomic_int asleep; /* workers that wait for a job on `wake` */
    atomic_int caller_asleep, closing, stopped;
    pthread_mutex_t lock;
    pthread_cond_t wake, finished;
};

int pool_stopped(const moert_pool *pool) { return atomic_load_explicit(&pool->stopped, memory_order_relaxed); }

static void run_item(moert_pool *pool, work run, const void *job, int item, int thread) {
    if (!pool_stopped(pool)) run(job, item, pool->own.at + (size_t)thread * pool->own_bytes);
}

/* Takes items of the present job until none is left. */
static void take_items(moert_pool *pool, int thread) {
    uint64_t ticket = atomic_load(&pool->ticket);
    while (ITEM(ticket) < ITEMS(ticket)) {
        ticket = atomic_fetch_add(&pool->ticket, 1);
        if (ITEM(ticket) >= ITEMS(ticket)) return;
        run_item(pool, pool->run, pool->job, (int)ITEM(ticket), thread);
        if (atomic_fetch_add(&pool->done, 1) + 1 == ITEMS(ticket) && atomic_load(&pool->caller_asleep)) {
            pthread_mutex_lock(&pool->lock);
            pthread_cond_signal(&pool->finished);
            pthread_mutex_unlock(&pool->lock);
        }
        ticket = atomic_load(&pool->ticket);
    }
}

static int has_items(moert_pool *pool) {
    uint64_t ticket = atomic_load(&pool->ticket);
    return ITEM(ticket) < ITEMS(ticket);
}

static void *worker(void *argument) {
    moert_pool *pool = argument;
    const int thread = atomic_fetch_add(&pool->numbers, 1) + 1; /* the caller is 0 */
    while (!atomic_load(&pool->closing)) {
        take_items(pool, thread);
        int64_t until = now_ns() + IDLE_NS;
        int ready = 0;
        while (!(ready = has_items(pool) || atomic_load(&pool->closing)) && now_ns() < until)
            for (int i = 0; i < 32 && !has_items(pool); i++) PAUSE();
        if (ready) continue;
        pthread_mutex_lock(&pool->lock);
        atomic_fetch_add(&pool->asleep, 1);
        while (!has_items(pool) && !atomic_load(&pool->closing)) pthread_cond_wait(&pool->wake, &pool->lock);
        atomic_fetch_sub(&pool->asleep, 1);
        pthread_mutex_unlock(&pool->lock);
    }
    return NULL;
}

static void wait_for_items(moert_pool *pool, int n) {
    int64_t until = 0;
    while (atomic_load(&pool->done) < n) {
        for (int i = 0; i < 64; i++) {
            if (atomic_load(&pool->done) == n) return;
            PAUSE();
        }
        int64_t time = now_ns();
        if (!until) until = time + FINISH_NS;
        if (time < until) continue;
        pthread_mutex_lock(&pool->lock);
        atomic_store(&pool->caller_asleep, 1);
        while (atomic_load(&pool->done) < n) pthread_cond_wait(&pool->finished, &pool->lock);
        atomic_store(&pool->caller_asleep, 0);
        pthread_mutex_unlock(&pool->lock);
    }
}

void pool_run(moert_pool *pool, work run, const void *job, int n, int alone) {
    if (pool->threads == 1 || n == 1 || alone) {
        for (int item = 0; item < n; item++) run_item(pool, run, job, item, 0);
        return;
    }
    pool->run = run;
    pool->job = job;
    atomic_store(&pool->done, 0);
    atomic_store(&pool->ticket, TICKET(n));
    if (atomic_load(&pool->asleep)) {
        pthread_mutex_lock(&pool->lock);
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->lock);
    }
    take_items(pool, 0);
    wait_for_items(pool, n);
}

/* `bytes` of memory, what is there if it will do. */
static void *ask(room *r, size_t bytes) {
    const int much_too_large = r->bytes > KEPT_SCRATCH && bytes < r->bytes / 8;
    if (bytes > r->bytes || much_too_large) {
        aligned_free(r->at);
        r->bytes = aligned(bytes + bytes / 4);
        r->at = aligned_alloc(ALIGN, r->bytes);
        if (!r->at) r->bytes = 0;
    }
    return r->at;
}

void *pool_scratch(moert_pool *pool, size_t bytes) { return ask(&pool->scratch, bytes); }
void *pool_lists(moert_pool *pool, size_t bytes) { return ask(&pool->lists, bytes); }

int pool_own(moert_pool *pool, size_t bytes) {
    pool->own_bytes = aligned(bytes + 1);
    return ask(&pool->own, (size_t)pool->threads * pool->own_bytes) ? 0 : -1;
}
const operations *pool_operations(const moert_pool *pool) { return pool->isa; }
int pool_threads(const moert_pool *pool) { return pool->threads; }

moert_pool *moert_pool_open(int isa, int threads) {
    if (isa < 0 || isa >= moert_isas_count || !moert_isas[isa]->runs() || threads < 1 || threads > 4096) return NULL;
    moert_pool *pool = aligned_alloc(ALIGN, aligned(sizeof(moert_pool)));
    if (!pool) return NULL;
    *pool = (moert_pool){.isa = moert_isas[isa], .threads = threads};
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pthread_cond_init(&pool->finished, NULL);
    pool->workers = calloc((size_t)threads, sizeof(pthread_t));
    while (pool->workers && pool->started < threads - 1) {
        if (pthread_create(&pool->workers[pool->started], NULL, worker, pool)) break;
        pool->started++;
    }
    if (pool->started < threads - 1 || pool_own(pool, 0)) {
        moert_pool_close(pool);
        return NULL;
    }
    return pool;
}

void moert_pool_stop(moert_pool *pool, int stopped) { atomic_store(&pool->stopped, stopped); }

void moert_pool_close(moert_pool *pool) {
    if (!pool) return;
    pthread_mutex_lock(&pool->lock);
    atomic_store(&pool->closing, 1);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->started; i++) pthread_join(pool->workers[i], NULL);
    pthread_mutex_destroy(&pool->lock);
    pthread_cond_destroy(&pool->wake);
    pthread_cond_destroy(&pool->finished);
    free(pool->workers);
    aligned_free(pool->scratch.at);
    aligned_free(pool->lists.at);
    aligned_free(pool->own.at);
    aligned_free(pool);
}
