/* moert_lstm_tokens and moert_attend_sparsely: sequences and rows together and alone, which is the same. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"

/* Sequences of an LSTM; `starts`: where the rows of each begin. */
typedef struct {
    moert_lstm of;
    int *starts, rows;
} lstm;

static void run_lstm(const lstm *l, const engine *on, float *state, float *y) {
    moert_lstm all = l->of;
    all.state = state, all.y = y;
    memcpy(state, l->of.state, (size_t)(2 * all.sequences * all.width) * sizeof *state);
    fill(y, l->rows * all.width);
    require(on, !moert_lstm_tokens(on->pool, &all), "no memory");
}

/* One sequence after the other, each in two pieces: of one that is read backward the rows behind come first. */
static void run_alone(const lstm *l, const engine *on, float *state, float *y) {
    int width = l->of.width;
    memcpy(state, l->of.state, (size_t)(2 * l->of.sequences * width) * sizeof *state);
    fill(y, l->rows * width);
    for (int s = 0; s < l->of.sequences; s++) {
        int32_t counts[2] = {l->of.counts[s] / 2, l->of.counts[s] - l->of.counts[s] / 2};
        for (int piece = 0; piece < 2; piece++) {
            int place = l->of.backward ? !piece : piece, at = l->starts[s] + (place ? counts[0] : 0);
            moert_lstm part = l->of;
            part.inputs += 4 * at * width, part.counts = &counts[place], part.sequences = 1;
            part.state = state + 2 * s * width, part.y = y + at * width;
            require(on, !moert_lstm_tokens(on->pool, &part), "no memory");
        }
    }
}

/* y = a · b + c · d of numbers that are known up to an error */
static void plain_sums(const estimate *a, const estimate *b, const estimate *c, const estimate *d, int length, estimate *y) {
    for (int i = 0; i < length; i++) {
        double first = a->value[i] * b->value[i], second = c->value[i] * d->value[i];
        double first_error = a->error[i] * (fabs(b->value[i]) + b->error[i]) + fabs(a->value[i]) * b->error[i];
        double second_error = c->error[i] * (fabs(d->value[i]) + d->error[i]) + fabs(c->value[i]) * d->error[i];
        y->value[i] = first + second;
        y->error[i] = first_error + second_error + INNER * (fabs(first) + fabs(second));
    }
}

static void plain_tanh(const estimate *x, int length, estimate *y) {
    for (int i = 0; i < length; i++) {
        y->error[i] = x->error[i] + INNER * fabs(tanh(x->value[i]));
        y->value[i] = tanh(x->value[i]);
    }
}

/* One row: h and c become those after it. */
static void plain_row(const moert_lstm *l, int row, estimate *h, estimate *c) {
    int width = l->width;
    estimate gates = estimate_make(4 * width), none = estimate_make(width);
    for (int i = 0; i < 4 * width; i++) {
        double sum = l->inputs[4 * row * width + i], terms = fabs(sum), error = 0;
        for (int j = 0; j < width; j++) {
            double weight = l->recurrent[4 * j * width + i];
            sum += h->value[j] * weight, terms += fabs(h->value[j] * weight), error += h->error[j] * fabs(weight);
        }
        gates.value[i] = sum, gates.error[i] = error + INNER * terms;
    }
    for (int i = 0; i < width; i++) none.value[i] = none.error[i] = 0;
    estimate input = estimate_at(&gates, 0), forget = estimate_at(&gates, width);
    estimate cell = estimate_at(&gates, 2 * width), output = estimate_at(&gates, 3 * width);
    plain_sigmoid(&input, width, &input), plain_sigmoid(&forget, width, &forget);
    plain_sigmoid(&output, width, &output), plain_tanh(&cell, width, &cell);
    plain_sums(&forget, c, &input, &cell, width, c);
    plain_tanh(c, width, h);
    plain_sums(&output, h, &none, &none, width, h);
    estimate_free(&gates), estimate_free(&none);
}

static void copy(const estimate *from, int length, estimate *to) {
    memcpy(to->value, from->value, (size_t)length * sizeof(double));
    memcpy(to->error, from->error, (size_t)length * sizeof(double));
}

static void plain_lstm(const lstm *l, estimate *y, estimate *left) {
    int width = l->of.width;
    for (int s = 0; s < l->of.sequences; s++) {
        estimate h = estimate_at(left, 2 * s * width), c = estimate_at(left, (2 * s + 1) * width);
        for (int i = 0; i < 2 * width; i++) h.value[i] = l->of.state[2 * s * width + i], h.error[i] = 0;
        for (int step = 0; step < l->of.counts[s]; step++) {
            int row = l->starts[s] + (l->of.backward ? l->of.counts[s] - 1 - step : step);
            estimate to = estimate_at(y, row * width);
            plain_row(&l->of, row, &h, &c);
            copy(&h, width, &to);
        }
    }
}

static void compare_lstm(const lstm *l) {
    int length = l->rows * l->of.width, size = 2 * l->of.sequences * l->of.width;
    float *y = claim((size_t)length * sizeof *y), *first_y = claim((size_t)length * sizeof *y);
    float *state = claim((size_t)size * sizeof *state), *first_state = claim((size_t)size * sizeof *state);
    estimate expected = estimate_make(length), left = estimate_make(size);
    plain_lstm(l, &expected, &left);
    for (int e = 0; e < engine_count; e++) {
        run_lstm(l, &engines[e], state, y);
        check(&engines[e], "output", y, &expected, length);
        check(&engines[e], "state", state, &left, size);
        agree(&engines[e], "output", y, first_y, length, EVERYWHERE);
        agree(&engines[e], "state", state, first_state, size, EVERYWHERE);
        run_alone(l, &engines[e], state, y);
        again(&engines[e], "output of sequences alone", y, first_y, length);
        again(&engines[e], "state of sequences alone", state, first_state, size);
    }
    estimate_free(&expected), estimate_free(&left);
    free(y), free(first_y), free(state), free(first_state);
}

static void one_lstm(int number) {
    int width = PICK(1, 3, 8, 15, 16, 17, 40, 63, 64, 65, 100, 130), sequences = PICK(0, 1, 1, 2, 3, 4, 5, 9, 18);
    int32_t *counts = claim((size_t)sequences * sizeof *counts);
    lstm l = {.starts = claim((size_t)sequences * sizeof(int))};
    for (int s = 0; s < sequences; s++) {
        counts[s] = PICK(0, 1, 1, 2, 3, 5, 12);
        l.starts[s] = l.rows, l.rows += counts[s];
    }
    float *inputs = draw_floats(4 * l.rows * width), *recurrent = draw_floats(4 * width * width);
    float *state = draw_floats(2 * sequences * width), size = (float)PICK(1, 1, 3, 100);
    for (int i = 0; i < 4 * l.rows * width; i++) inputs[i] *= size;
    for (int i = 0; i < 4 * width * width; i++) recurrent[i] *= 2.0f / (float)width;
    l.of = (moert_lstm){inputs, recurrent, counts, state, NULL, sequences, width, number % 2};
    describe("lstm: %d rows of %d sequences, width %d, backward %d", l.rows, sequences, width, l.of.backward);
    compare_lstm(&l);
    free(counts), free(l.starts), free(inputs), free(recurrent), free(state);
}

/* Sparse attention */

static int falling(const void *a, const void *b) {
    double first = *(const double *)a, second = *(const double *)b;
    return (first < second) - (first > second);
}

/* The largest of those that have some weight count: as many as there can be, k, such that 1 + k · the last > their sum. */
static double plain_threshold(const double *scores, int n) {
    double *sorted = claim((size_t)n * sizeof *sorted), sum = 0, threshold = 0;
    memcpy(sorted, scores, (size_t)n * sizeof *sorted);
    qsort(sorted, (size_t)n, sizeof *sorted, falling);
    for (int k = 0; k < n; k++) {
        sum += sorted[k];
        if (1 + (k + 1) * sorted[k] > sum) threshold = (sum - 1) / (k + 1);
    }
    free(sorted);
    return threshold;
}

static void plain_attend(const moert_sparse *s, int row, estimate *y) {
    int first = s->spans[2 * row], n = s->spans[2 * row + 1] - first, width = s->width;
    double *scores = claim((size_t)(n > 0 ? n : 0) * sizeof *scores), doubt = 0;
    for (int i = 0; i < width; i++) y->value[i] = y->error[i] = 0;
    for (int k = 0; k < n; k++) {
        double sum = 0, terms = 0;
        for (int i = 0; i < width; i++) {
            double term = (double)s->queries[row * width + i] * s->keys[(first + k) * width + i];
            sum += term, terms += fabs(term);
        }
        scores[k] = sum / sqrt(width), doubt = fmax(doubt, INNER * (1 + terms / sqrt(width)));
    }
    double threshold = plain_threshold(scores, n > 0 ? n : 0);
    for (int k = 0; k < n; k++) {
        double weight = fmax(scores[k] - threshold, 0);
        if (scores[k] < threshold - 2 * doubt) continue;
        for (int i = 0; i < width; i++) {
            double value = s->values[(first + k) * width + i];
            y->value[i] += weight * value, y->error[i] += (2 * doubt + INNER * weight) * fabs(value);
        }
    }
    free(scores);
}

static void run_rows(const moert_sparse *of, const engine *on, int most, float *y) {
    fill(y, of->rows * of->width);
    for (int row = 0; row < of->rows; row += most) {
        moert_sparse part = *of;
        part.queries += row * of->width, part.spans += 2 * row, part.y = y + row * of->width;
        part.rows = most < of->rows - row ? most : of->rows - row;
        require(on, !moert_attend_sparsely(on->pool, &part), "no memory");
    }
}

static int32_t *draw_spans(int rows, int keys) {
    int32_t *spans = claim((size_t)(2 * rows) * sizeof *spans);
    for (int row = 0; row < rows; row++) {
        int first = draw(keys + 1), stop = draw(keys + 1), swap = draw(4) && stop < first;
        spans[2 * row] = swap ? stop : first, spans[2 * row + 1] = swap ? first : stop;
    }
    return spans;
}

static void one_sparse(int number) {
    int width = PICK(1, 3, 8, 15, 16, 17, 32, 33, 64, 100, 128), rows = PICK(1, 2, 5, 40), length = rows * width;
    int keys = PICK(1, 2, 5, 12, 17, 50, 130), scale = PICK(1, 3, 10), alike = number % 4 == 0;
    float *queries = draw_floats(length), *key = draw_floats(keys * width), *values = draw_floats(keys * width);
    float *y = claim((size_t)length * sizeof *y), *first = claim((size_t)length * sizeof *first);
    int32_t *spans = draw_spans(rows, keys);
    for (int i = 0; i < length; i++) queries[i] *= (float)scale;
    for (int k = 1; k < keys && alike; k++)
        if (draw(2)) memcpy(key + k * width, key, (size_t)width * sizeof *key); /* equal scores */
    moert_sparse of = {queries, key, values, spans, y, rows, width};
    estimate expected = estimate_make(length);
    describe("sparse: %d rows, %d keys, width %d, scale %d, alike %d", rows, keys, width, scale, alike);
    for (int row = 0; row < rows; row++) {
        estimate at = estimate_at(&expected, row * width);
        plain_attend(&of, row, &at);
    }
    for (int e = 0; e < engine_count; e++) {
        run_rows(&of, &engines[e], rows, y);
        check(&engines[e], "output", y, &expected, length);
        agree(&engines[e], "output", y, first, length, EVERYWHERE);
        run_rows(&of, &engines[e], 1, y);
        again(&engines[e], "output of one row", y, first, length);
    }
    estimate_free(&expected);
    free(queries), free(key), free(values), free(spans), free(y), free(first);
}

/* Numbers that are none, or too large, in the first of two sequences or rows: every call returns, and the other is what it
 * is without. */
static void wild(float with) {
    enum { WIDTH = 20 };
    static const int32_t counts[2] = {1, 1}, spans[4] = {0, 2, 0, 2};
    float recurrent[4 * WIDTH * WIDTH], inputs[2][8 * WIDTH], states[2][4 * WIDTH], found[2][2 * WIDTH];
    describe("foreseen with numbers like %g", with);
    for (int i = 0; i < 4 * WIDTH * WIDTH; i++) recurrent[i] = draw_float();
    for (int i = 0; i < 8 * WIDTH; i++) inputs[0][i] = inputs[1][i] = draw_float();
    for (int i = 0; i < 4 * WIDTH; i += 3) inputs[1][i] = with;
    for (int e = 0; e < engine_count; e++) {
        for (int is_wild = 0; is_wild < 2; is_wild++) {
            for (int i = 0; i < 4 * WIDTH; i++) states[is_wild][i] = is_wild && i < 2 * WIDTH ? with : 0.5f;
            const moert_lstm l = {inputs[is_wild], recurrent, counts, states[is_wild], found[is_wild], 2, WIDTH, 0};
            require(&engines[e], !moert_lstm_tokens(engines[e].pool, &l), "no memory");
        }
        again(&engines[e], "output of the other sequence", found[1] + WIDTH, found[0] + WIDTH, WIDTH);
        again(&engines[e], "state of the other sequence", states[1] + 2 * WIDTH, states[0] + 2 * WIDTH, 2 * WIDTH);
        for (int is_wild = 0; is_wild < 2; is_wild++) {
            const float *queries = inputs[is_wild] + 3 * WIDTH; /* of the first row alone */
            const moert_sparse s = {queries, recurrent, inputs[0], spans, found[is_wild], 2, WIDTH};
            require(&engines[e], !moert_attend_sparsely(engines[e].pool, &s), "no memory");
        }
        again(&engines[e], "output of the other row", found[1] + WIDTH, found[0] + WIDTH, WIDTH);
    }
}

void lstm_cases(void) {
    for (int number = 0; number < 70; number += apart) {
        seed(10600 + (uint64_t)number);
        one_lstm(number);
    }
}

void sparse_cases(void) {
    static const float numbers[] = {NAN, INFINITY, -INFINITY, 3e38f, -3e38f};
    for (int number = 0; number < 80; number += apart) {
        seed(10700 + (uint64_t)number);
        one_sparse(number);
    }
    for (int number = 0; number < 5; number++) {
        seed(10800 + (uint64_t)number);
        wild(numbers[number]);
    }
}
