/* Many reads in one call: by io_uring where the system has it and lets us, else by a few threads. Each read that has come is
 * checked while others are still on their way.
 *
 * Reads that follow each other in a file become one request, scattered to their places. What a request does not bring (it
 * ended early, or was refused) is asked for again, read by read, by whoever finds that out; direct reads that are refused
 * for their place or length go through the page cache then. No request outlives a call, whatever signals come. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#ifdef _WIN32
#include <io.h>
#include <windows.h>
struct iovec {
    void *iov_base;
    size_t iov_len;
};
#else
#include <sys/uio.h>
#include <unistd.h>
#endif

#include "moert.h"
#include "waiting.h"

#if defined(__linux__) && defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#if defined(__NR_io_uring_setup) && defined(IORING_FEAT_SINGLE_MMAP)
#define HAS_RING
#endif
#endif
#endif

#ifndef O_DIRECT
#define O_DIRECT 0
#endif

enum { MOST = 256, DEPTH = 64, PAGE = 4096, MOST_THREADS = 64 };
#define MOST_TOGETHER (1 << 20) /* bytes of one request that is made of several reads */
#define LOOK_NS 150000          /* how long the caller looks for what comes before it sleeps */

typedef struct {
    int first, count;
} request; /* reads that follow each other */

typedef struct {
    int fd; /* -1: there is none */
    unsigned *sq_head, *sq_tail, *sq_array, sq_mask;
    unsigned *flags; /* NULL: what has come is not told without asking */
    unsigned *cq_head, *cq_tail, cq_mask;
    void *sqes, *cqes, *rings;
    size_t sqes_bytes, rings_bytes;
} ring;

struct moert_reader {
    ring ring;
    int threads, started;
    pthread_t workers[MOST_THREADS];
    pthread_mutex_t lock;
    pthread_cond_t work, finished;
    int next, done, closing; /* of the requests: which is to be taken, how many are done */
    int n; /* that threads may take */
    request requests[MOST];
    struct iovec places[MOST];
    moert_read *reads;
};

#ifdef _WIN32
static int make_buffered(int fd) { return (void)fd, 0; }

/* At most 1 GiB; the end of the file is no error, and 0 bytes. */
static ssize_t read_at(int fd, void *into, int64_t nbytes, int64_t offset) {
    OVERLAPPED at = {.Offset = (DWORD)offset, .OffsetHigh = (DWORD)(offset >> 32)};
    DWORD count = 0, most = nbytes < 1 << 30 ? (DWORD)nbytes : 1 << 30;
    if (ReadFile((HANDLE)_get_osfhandle(fd), into, most, &count, &at) || GetLastError() == ERROR_HANDLE_EOF)
        return (ssize_t)count;
    errno = EIO;
    return -1;
}
#else
static int is_direct(int fd) {
    int flags = O_DIRECT ? fcntl(fd, F_GETFL) : 0;
    return flags > 0 && (flags & O_DIRECT);
}

/* Lets reads go through the page cache from now on; 0 if they did so already. */
static int make_buffered(int fd) {
    return is_direct(fd) && fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_DIRECT) == 0;
}

static ssize_t read_at(int fd, void *into, int64_t nbytes, int64_t offset) {
    return pread(fd, into, (size_t)nbytes, (off_t)offset);
}
#endif

/* The rest of a read: whole pages, then what is behind them, until the file ends. */
static void read_on(moert_read *read) {
    const int64_t whole = read->nbytes - read->nbytes % PAGE;
    while (read->found < read->nbytes) {
        int64_t stop = read->found < whole ? whole : read->nbytes;
        ssize_t count = read_at(read->fd, (char *)read->place + read->found, stop - read->found, read->offset + read->found);
        if (count < 0 && (errno == EINTR || (errno == EINVAL && make_buffered(read->fd)))) continue;
        if (count < 0) read->error = errno;
        if (count <= 0) return;
        read->found += count;
    }
}

static void check(moert_read *read) {
#ifdef POSIX_FADV_DONTNEED
    if (read->forget && !is_direct(read->fd))
        posix_fadvise(read->fd, (off_t)read->offset, (off_t)read->nbytes, POSIX_FADV_DONTNEED);
#endif
    const int whole = !read->error && read->found == read->nbytes;
    read->wrong = whole && read->checked && moert_crc32(0, read->place, read->nbytes) != read->crc;
}

/* A request brought so many bytes, or failed: -errno, or -EAGAIN where nothing was tried. */
static void finish(moert_reader *reader, const request *of, int64_t count) {
    const int failed = of->count == 1 && count < 0 && count != -EAGAIN && count != -EINTR && count != -EINVAL;
    for (int i = of->first; i < of->first + of->count; i++) {
        moert_read *read = &reader->reads[i];
        read->found = count < 0 ? 0 : count < read->nbytes ? count : read->nbytes;
        count -= count < 0 ? 0 : read->found;
        if (failed) read->error = (int)-count;
        else read_on(read);
        check(read);
    }
}

static void carry_out(moert_reader *reader, const request *asked) {
    int64_t count = -EAGAIN;
#if defined(__linux__)
    const moert_read *first = &reader->reads[asked->first];
    if (asked->count > 1) count = preadv(first->fd, &reader->places[asked->first], asked->count, (off_t)first->offset);
    if (count < 0 && asked->count > 1) count = -EAGAIN;
#endif
    finish(reader, asked, count);
}

/* Which of the reads go together; how many requests that makes. */
static int sort_out(moert_reader *reader, int count) {
    int64_t nbytes = 0;
    int n = 0;
    for (int i = 0; i < count; i++) {
        moert_read *read = &reader->reads[i], *last = read - 1;
        reader->places[i] = (struct iovec){read->place, (size_t)read->nbytes};
        read->found = 0;
        read->error = read->wrong = 0;
        const int follows = i && last->fd == read->fd && last->offset + last->nbytes == read->offset;
        if (follows && nbytes + read->nbytes <= MOST_TOGETHER) {
            reader->requests[n - 1].count++;
            nbytes += read->nbytes;
        } else {
            reader->requests[n++] = (request){i, 1};
            nbytes = read->nbytes;
        }
    }
    return n;
}

/* Threads */

/* Takes requests until none is left. The lock is held, but for the reading. */
static void take(moert_reader *reader) {
    while (reader->next < reader->n) {
        const request *asked = &reader->requests[reader->next++];
        pthread_mutex_unlock(&reader->lock);
        carry_out(reader, asked);
        pthread_mutex_lock(&reader->lock);
        if (++reader->done == reader->n) pthread_cond_signal(&reader->finished);
    }
}

static void *worker(void *argument) {
    moert_reader *reader = argument;
    pthread_mutex_lock(&reader->lock);
    while (!reader->closing) {
        take(reader);
        if (!reader->closing) pthread_cond_wait(&reader->work, &reader->lock);
    }
    pthread_mutex_unlock(&reader->lock);
    return NULL;
}

static void read_by_threads(moert_reader *reader, int n) {
    pthread_mutex_lock(&reader->lock);
    reader->next = reader->done = 0;
    reader->n = n;
    while (reader->started < reader->threads - 1 && reader->started < n - 1) {
        if (pthread_create(&reader->workers[reader->started], NULL, worker, reader)) break;
        reader->started++;
    }
    pthread_cond_broadcast(&reader->work);
    take(reader);
    while (reader->done < reader->n) pthread_cond_wait(&reader->finished, &reader->lock);
    reader->n = reader->next = 0;
    pthread_mutex_unlock(&reader->lock);
}

/* io_uring */

#ifdef HAS_RING
#define LOAD(at) __atomic_load_n(at, __ATOMIC_ACQUIRE)
#define STORE(at, value) __atomic_store_n(at, value, __ATOMIC_RELEASE)
#ifndef IORING_SETUP_COOP_TASKRUN
#define IORING_SETUP_COOP_TASKRUN (1U << 8)
#define IORING_SETUP_TASKRUN_FLAG (1U << 9)
#define IORING_SQ_TASKRUN (1U << 2)
#endif

static void close_ring(ring *r) {
    if (r->rings) munmap(r->rings, r->rings_bytes);
    if (r->sqes) munmap(r->sqes, r->sqes_bytes);
    if (r->fd >= 0) close(r->fd);
    *r = (ring){.fd = -1};
}

static void *map_ring(int fd, size_t nbytes, off_t what) {
    void *at = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, what);
    return at == MAP_FAILED ? NULL : at;
}

/* Leaves fd at -1 where the system refuses: an old one, or one that does not trust this process. */
static void open_ring(ring *r) {
    struct io_uring_params with = {.flags = IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG};
    *r = (ring){.fd = (int)syscall(__NR_io_uring_setup, DEPTH, &with)};
    if (r->fd < 0 && errno == EINVAL) {
        with = (struct io_uring_params){0};
        r->fd = (int)syscall(__NR_io_uring_setup, DEPTH, &with);
    }
    if (r->fd < 0) return;
    size_t sq = with.sq_off.array + with.sq_entries * sizeof(unsigned);
    size_t cq = with.cq_off.cqes + with.cq_entries * sizeof(struct io_uring_cqe);
    r->rings_bytes = sq > cq ? sq : cq;
    r->sqes_bytes = with.sq_entries * sizeof(struct io_uring_sqe);
    if ((with.features & IORING_FEAT_SINGLE_MMAP) && with.sq_entries >= DEPTH) {
        r->rings = map_ring(r->fd, r->rings_bytes, IORING_OFF_SQ_RING);
        r->sqes = map_ring(r->fd, r->sqes_bytes, IORING_OFF_SQES);
    }
    if (!r->rings || !r->sqes) {
        close_ring(r);
        return;
    }
    char *at = r->rings;
    r->sq_head = (unsigned *)(at + with.sq_off.head), r->sq_tail = (unsigned *)(at + with.sq_off.tail);
    r->sq_array = (unsigned *)(at + with.sq_off.array), r->sq_mask = *(unsigned *)(at + with.sq_off.ring_mask);
    r->cq_head = (unsigned *)(at + with.cq_off.head), r->cq_tail = (unsigned *)(at + with.cq_off.tail);
    if (with.flags & IORING_SETUP_TASKRUN_FLAG) r->flags = (unsigned *)(at + with.sq_off.flags);
    r->cqes = at + with.cq_off.cqes, r->cq_mask = *(unsigned *)(at + with.cq_off.ring_mask);
}

static void ask(moert_reader *reader, int number) {
    ring *r = &reader->ring;
    const request *asked = &reader->requests[number];
    const moert_read *first = &reader->reads[asked->first];
    unsigned tail = *r->sq_tail, slot = tail & r->sq_mask;
    struct io_uring_sqe *sqe = (struct io_uring_sqe *)r->sqes + slot;
    memset(sqe, 0, sizeof *sqe);
    sqe->opcode = IORING_OP_READV;
    sqe->fd = first->fd;
    sqe->off = (uint64_t)first->offset;
    sqe->addr = (uint64_t)(uintptr_t)&reader->places[asked->first];
    sqe->len = (unsigned)asked->count;
    sqe->user_data = (uint64_t)number;
    r->sq_array[slot] = slot;
    STORE(r->sq_tail, tail + 1);
}

/* Finishes what has come; how many requests that were. */
static int reap(moert_reader *reader) {
    ring *r = &reader->ring;
    int count = 0;
    for (unsigned head = *r->cq_head; head != LOAD(r->cq_tail); count++) {
        const struct io_uring_cqe cqe = ((struct io_uring_cqe *)r->cqes)[head & r->cq_mask];
        STORE(r->cq_head, ++head);
        finish(reader, &reader->requests[cqe.user_data], cqe.res);
    }
    return count;
}

/* The ring takes no more: what it has not taken is read here, what it has is waited for. How many requests are done then. */
static int do_without(moert_reader *reader, int asked, int flying) {
    ring *r = &reader->ring;
    int left = (int)(*r->sq_tail - LOAD(r->sq_head));
    STORE(r->sq_tail, *r->sq_tail - (unsigned)left);
    for (int i = asked - left; i < asked; i++) carry_out(reader, &reader->requests[i]);
    for (int waiting = flying - left; waiting > 0; waiting -= reap(reader))
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    return flying;
}

/* Looks for something that has come, as long as a small read takes: a processor that sleeps comes back slowly. */
static void look(const ring *r) {
    const int64_t until = now_ns() + LOOK_NS;
    do
        for (int i = 0; i < 32; i++) {
            if (*r->cq_head != LOAD(r->cq_tail) || (LOAD(r->flags) & IORING_SQ_TASKRUN)) return;
            PAUSE();
        }
    while (now_ns() < until);
}

static void read_by_ring(moert_reader *reader, int n) {
    ring *r = &reader->ring;
    int asked = 0, flying = 0, done = 0;
    while (done < n) {
        for (; asked < n && flying < DEPTH; flying++) ask(reader, asked++);
        unsigned left = *r->sq_tail - LOAD(r->sq_head);
        if (r->flags && left && syscall(__NR_io_uring_enter, r->fd, left, 0, 0, NULL, 0) == (long)left) left = 0;
        if (r->flags && !left) look(r);
        long taken = syscall(__NR_io_uring_enter, r->fd, left, 1, IORING_ENTER_GETEVENTS, NULL, 0);
        int came = taken < 0 && errno != EINTR ? do_without(reader, asked, flying) : reap(reader);
        flying -= came;
        done += came;
    }
}
#else
static void open_ring(ring *r) { *r = (ring){.fd = -1}; }
static void close_ring(ring *r) { (void)r; }
static void read_by_ring(moert_reader *reader, int n) { (void)reader, (void)n; }
#endif

moert_reader *moert_reader_open(int threads, int by_ring) {
    moert_reader *reader = calloc(1, sizeof *reader);
    if (!reader) return NULL;
    reader->ring.fd = -1;
    reader->threads = threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads;
    pthread_mutex_init(&reader->lock, NULL);
    pthread_cond_init(&reader->work, NULL);
    pthread_cond_init(&reader->finished, NULL);
    if (by_ring) open_ring(&reader->ring);
    return reader;
}

void moert_reader_close(moert_reader *reader) {
    if (!reader) return;
    pthread_mutex_lock(&reader->lock);
    reader->closing = 1;
    pthread_cond_broadcast(&reader->work);
    pthread_mutex_unlock(&reader->lock);
    for (int i = 0; i < reader->started; i++) pthread_join(reader->workers[i], NULL);
    close_ring(&reader->ring);
    pthread_mutex_destroy(&reader->lock);
    pthread_cond_destroy(&reader->work);
    pthread_cond_destroy(&reader->finished);
    free(reader);
}

int moert_reader_has_ring(const moert_reader *reader) { return reader->ring.fd >= 0; }

int moert_read_many(moert_reader *reader, moert_read *reads, int count) {
    int failed = 0;
    for (int first = 0; first < count; first += MOST) {
        int n = count - first < MOST ? count - first : MOST;
        reader->reads = reads + first;
        int asked = sort_out(reader, n);
        if (reader->ring.fd >= 0) read_by_ring(reader, asked);
        else if (asked == 1) carry_out(reader, reader->requests);
        else read_by_threads(reader, asked);
        for (int i = first; i < first + n; i++) failed += reads[i].error || reads[i].wrong || reads[i].found < reads[i].nbytes;
    }
    return failed;
}
