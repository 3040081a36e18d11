/* Mapped files that become shorter, or that their drive no longer gives: the system sends SIGBUS to whoever reads a page that
 * is not there, which ends the process. Within a fence the rest of the mapping becomes zeros instead, and the fence is broken:
 * who uses what lies there looks at that afterwards.
 *
 * The handler is there while there are fences. What happens elsewhere goes to the handler that was there before. */
#define _GNU_SOURCE
#include "moert.h"

#ifdef _WIN32 /* sends no SIGBUS: files are not mapped there */
int moert_fence(const void *start, int64_t nbytes) { return (void)start, (void)nbytes, -1; }
int moert_fence_broken(int fence) { return (void)fence, 0; }
void moert_fence_end(int fence) { (void)fence; }
int64_t moert_fences_broken(void) { return 0; }
#else
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#define FENCES 65536

/* start is 0 where there is none; the handler reads them while others change them. */
static struct {
    _Atomic uintptr_t start, stop;
    _Atomic int broken;
} fences[FENCES];
static _Atomic int reached;        /* those behind were never used */
static _Atomic int64_t breaks;
static pthread_mutex_t changing = PTHREAD_MUTEX_INITIALIZER;
static int standing, next, installed;
static uintptr_t page_bytes;
static struct sigaction before;

static void hand_on(int number, siginfo_t *info, void *context) {
    if (before.sa_flags & SA_SIGINFO) {
        before.sa_sigaction(number, info, context);
    } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
        before.sa_handler(number);
    } else { /* what has failed fails again; what was only sent is sent again */
        signal(number, SIG_DFL);
        if (info->si_code <= 0)
            raise(number);
    }
}

static void mend(int number, siginfo_t *info, void *context) {
    int said = errno;
    uintptr_t at = (uintptr_t)info->si_addr;
    int count = info->si_code > 0 ? atomic_load(&reached) : 0;
    for (int i = 0; i < count; i++) {
        uintptr_t start = atomic_load(&fences[i].start), stop = atomic_load(&fences[i].stop);
        if (!start || at < start || at >= stop)
            continue;
        uintptr_t page = at / page_bytes * page_bytes;
        size_t rest = (stop - page + page_bytes - 1) / page_bytes * page_bytes;
        if (mmap((void *)page, rest, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != (void *)page)
            break;
        atomic_store(&fences[i].broken, 1);
        atomic_fetch_add(&breaks, 1);
        errno = said;
        return;
    }
    errno = said;
    hand_on(number, info, context);
}

static int is_ours(void) {
    struct sigaction now;
    return !sigaction(SIGBUS, NULL, &now) && (now.sa_flags & SA_SIGINFO) && now.sa_sigaction == mend;
}

static int install(void) {
    struct sigaction ours = {.sa_flags = SA_SIGINFO | SA_ONSTACK};
    if (installed) /* also where another has put its own before it, and may hand on to it */
        return 1;
    page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE);
    ours.sa_sigaction = mend;
    sigemptyset(&ours.sa_mask);
    installed = !sigaction(SIGBUS, &ours, &before);
    return installed;
}

int moert_fence(const void *start, int64_t nbytes) {
    int found = -1;
    pthread_mutex_lock(&changing);
    for (int tried = 0; tried < FENCES && found < 0 && install(); tried++, next = (next + 1) % FENCES) {
        if (atomic_load(&fences[next].start))
            continue;
        found = next;
        atomic_store(&fences[found].broken, 0);
        atomic_store(&fences[found].stop, (uintptr_t)start + (uintptr_t)nbytes);
        atomic_store(&fences[found].start, (uintptr_t)start);
        if (found >= atomic_load(&reached))
            atomic_store(&reached, found + 1);
        standing++;
    }
    pthread_mutex_unlock(&changing);
    return found;
}

int moert_fence_broken(int fence) { return atomic_load(&fences[fence].broken); }

void moert_fence_end(int fence) {
    pthread_mutex_lock(&changing);
    atomic_store(&fences[fence].start, 0);
    standing--;
    if (!standing && is_ours()) {
        sigaction(SIGBUS, &before, NULL);
        installed = 0;
    }
    pthread_mutex_unlock(&changing);
}

int64_t moert_fences_broken(void) { return atomic_load(&breaks); }
#endif
