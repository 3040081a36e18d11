/* Runs all cases; ends with 1 if one failed. The hash at the end is the same on every machine. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "driver.h"

enum { MOST_ENGINES = 64, MOST_TOLD = 20 };
static const int thread_counts[] = {1, 3};

engine engines[MOST_ENGINES];
int engine_count;
int apart = 1;

static uint64_t hashes[MOST_ENGINES + 1];
static char text[600];
static int cases, failures, told, told_of_case;
static double worst;
static char **named; /* groups of cases to run; none: all */
static int names;

void describe(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    cases++, told_of_case = 0;
}

static int may_tell(void) {
    failures++;
    if (told_of_case || told >= MOST_TOLD) return 0;
    told_of_case = 1, told++;
    return 1;
}

void check(const engine *on, const char *what, const float *found, const estimate *expected, int length) {
    for (int i = 0; i < length; i++) {
        double off = fabs(found[i] - expected->value[i]), bound = expected->error[i] + 1e-30;
        if (off <= bound) {
            worst = fmax(worst, off / bound);
            continue;
        }
        if (may_tell())
            printf("FAILED %s, %d threads: %s: %s[%d of %d] is %.9g, expected %.9g within %.3g\n", on->isa, on->threads,
                   text, what, i, length, found[i], expected->value[i], bound);
        return;
    }
}

void require(const engine *on, int holds, const char *what) {
    if (!holds && may_tell()) printf("FAILED %s, %d threads: %s: %s\n", on->isa, on->threads, text, what);
}

void hash(const engine *on, const float *numbers, int length) {
    uint64_t *value = &hashes[on ? on - engines : MOST_ENGINES];
    for (int i = 0; i < length; i++) {
        uint32_t bits;
        float number = numbers[i] + 0.0f; /* no negative zero */
        memcpy(&bits, &number, 4);
        for (int byte = 0; byte < 4; byte++) *value = (*value ^ (bits >> 8 * byte & 255)) * 1099511628211ull;
    }
}

/* Tells the first number that differs. */
static void compare(const engine *on, const char *what, const float *found, const float *expected, int length,
                    const char *than) {
    int i = 0;
    while (i < length && !memcmp(&found[i], &expected[i], sizeof *found)) i++;
    if (i < length && may_tell())
        printf("FAILED %s, %d threads: %s: %s[%d of %d] is %.9g, %s %.9g\n", on->isa, on->threads, text, what, i, length,
               found[i], than, expected[i]);
}

void agree(const engine *on, const char *what, const float *found, float *first, int length, int where) {
    if (on == engines) memcpy(first, found, (size_t)length * sizeof *found);
    compare(on, what, found, first, length, "on the first engine");
    if (where != EVERYWHERE) return;
    hash(on, found, length);
    if (on == engines) hash(NULL, found, length);
}

void again(const engine *on, const char *what, const float *found, const float *before, int length) {
    compare(on, what, found, before, length, "the first time");
}

void fill(float *numbers, int length) {
    for (int i = 0; i < length; i++) numbers[i] = NAN;
}

static int open_engines(void) {
    if (moert_abi() != MOERT_ABI) return printf("FAILED: interface %d, expected %d\n", moert_abi(), MOERT_ABI), 0;
    for (int isa = 0; isa < moert_isa_count(); isa++) {
        printf("%s: %s\n", moert_isa_name(isa), moert_isa_runs(isa) ? "tested" : "does not run here");
        for (int i = 0; moert_isa_runs(isa) && i < 2 && engine_count < MOST_ENGINES; i++) {
            engine made = {moert_isa_name(isa), thread_counts[i], moert_pool_open(isa, thread_counts[i])};
            if (!made.pool) return printf("FAILED: no pool for %s\n", made.isa), 0;
            engines[engine_count++] = made;
        }
    }
    return engine_count > 0;
}

static int wanted(const char *name) {
    for (int i = 0; i < names; i++)
        if (!strcmp(name, named[i])) return 1;
    return !names;
}

static void run(const char *name, void (*group)(void)) {
    if (!wanted(name)) return;
    int cases_before = cases, failures_before = failures;
    time_t start = time(NULL);
    group();
    printf("%-8s %5d cases, %d failures, %d s\n", name, cases - cases_before, failures - failures_before,
           (int)(time(NULL) - start));
    fflush(stdout);
}

/* `driver some`: fewer of the slower cases, for programs that a tool makes slow. `driver [some] delta scan`: these alone. */
int main(int count, char **arguments) {
    named = arguments + 1, names = count - 1;
    if (names && !strcmp(*named, "some")) apart = 5, named++, names--;
    if (!open_engines()) return 1;
    for (int i = 0; i <= MOST_ENGINES; i++) hashes[i] = 14695981039346656037ull;
    run("linear", linear_cases);
    run("rows", rows_cases);
    run("mixture", mixture_cases);
    run("fire", fire_cases);
    run("project", project_cases);
    run("attend", attend_cases);
    run("latent", latent_cases);
    run("keep", keep_cases);
    run("norm", norm_cases);
    run("head", head_cases);
    run("scores", scores_cases);
    run("choose", choose_cases);
    run("gate", gate_cases);
    run("conv", conv_cases);
    run("delta", delta_cases);
    run("scan", scan_cases);
    run("lstm", lstm_cases);
    run("sparse", sparse_cases);
    run("softplus", softplus_cases);
    run("balance", balance_cases);
    run("gated", gated_cases);
    run("wild", wild_cases);
    run("exact", exact_cases);
    run("coding", coding_cases);
    run("reads", reads_cases);
    describe("hash of all that is the same everywhere");
    for (int i = 0; i < engine_count; i++) {
        require(&engines[i], hashes[i] == hashes[MOST_ENGINES], "differs");
        moert_pool_close(engines[i].pool);
    }
    printf("hash %016llx; largest error %.2g of its bound; %d failures\n", (unsigned long long)hashes[MOST_ENGINES],
           worst, failures);
    return failures > 0;
}
