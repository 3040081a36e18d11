/* The arithmetic in double precision, each number with a bound of the error that float32 may bring into it.
 *
 * A number that is rounded to 8 bits near the middle of two steps may come out a step apart: its error is then a step.
 */
#include <math.h>
#include <stdlib.h>

#include "problem.h"

estimate estimate_make(int length) {
    return (estimate){claim((size_t)length * sizeof(double)), claim((size_t)length * sizeof(double))};
}

estimate estimate_of(const float *values, int length) {
    estimate made = {claim((size_t)length * sizeof(double)), NULL};
    for (int i = 0; i < length; i++) made.value[i] = values[i];
    return made;
}

estimate estimate_at(const estimate *numbers, int at) {
    return (estimate){numbers->value + at, numbers->error ? numbers->error + at : NULL};
}

void estimate_free(estimate *numbers) {
    free(numbers->value);
    free(numbers->error);
}

/* One block of exact float32 numbers, as moert.h says it. */
static void round_exact(const double *x, int length, double *value) {
    float largest = 0;
    for (int i = 0; i < length; i++) largest = fmaxf(largest, fabsf((float)x[i]));
    float turns = largest > 0 ? 127.0f / largest : 0, step = largest / 127.0f;
    for (int i = 0; i < length; i++) {
        float scaled = (float)x[i] * turns;
        value[i] = (double)rintf(scaled) * step;
    }
}

static void round_uncertain(const double *x, const double *e, int length, double *value, double *error) {
    double largest = 0, doubt = 0;
    for (int i = 0; i < length; i++) {
        largest = fmax(largest, fabs(x[i]));
        doubt = fmax(doubt, e[i]);
    }
    double step = largest / 127;
    for (int i = 0; i < length; i++) {
        if (step < 1e-30) { /* too small for a bound: anything up to the largest */
            value[i] = 0, error[i] = 2 * (largest + doubt);
            continue;
        }
        double scaled = x[i] / step, reach = (e[i] + fabs(scaled) / 127 * doubt) / step + 1e-4;
        double low = rint(scaled - reach), high = rint(scaled + reach);
        value[i] = rint(scaled) * step;
        error[i] = (high - low) * step + fabs(scaled) * doubt / 127;
    }
}

static estimate rounded(const estimate *x, int length, int block) {
    estimate made = {claim((size_t)length * sizeof(double)), NULL};
    if (x->error) made.error = claim((size_t)length * sizeof(double));
    for (int at = 0; at < length; at += block) {
        int here = length - at < block ? length - at : block;
        if (x->error) round_uncertain(x->value + at, x->error + at, here, made.value + at, made.error + at);
        else round_exact(x->value + at, here, made.value + at);
    }
    return made;
}

/* What trellis codes are multiplied with (SPEC.md, section 3). */
static estimate turned(const estimate *x, int length) {
    estimate made = estimate_make(length);
    int size = 64;
    while (length % size) size /= 2;
    for (int at = 0; at < length; at += size) {
        double doubt = 0;
        for (int i = at; i < at + size; i++) doubt += 1e-6 * fabs(x->value[i]) + (x->error ? x->error[i] : 0);
        for (int i = 0; i < size; i++) {
            double sum = 0;
            for (int k = 0; k < size; k++) {
                uint32_t mixed = (uint32_t)(at + k) * 2654435761u;
                mixed = (mixed ^ mixed >> 15) * 2246822519u;
                sum += (mixed >> 31) ^ (__builtin_popcount((unsigned)(i & k)) & 1) ? -x->value[at + k] : x->value[at + k];
            }
            made.value[at + i] = sum / sqrt(size), made.error[at + i] = doubt / sqrt(size);
        }
    }
    return made;
}

void plain_multiply(const problem_matrix *matrix, const estimate *x, double share, estimate *y) {
    int rows = matrix->matrix.rows, cols = matrix->matrix.cols, codes = matrix->matrix.kind <= 8;
    estimate turn = matrix->matrix.kind < 0 ? turned(x, cols) : (estimate){NULL, NULL};
    estimate input = codes ? rounded(turn.value ? &turn : x, cols, moert_block(cols, matrix->matrix.group)) : *x;
    for (int r = 0; r < rows; r++) {
        const double *weight = matrix->weight + (size_t)r * cols, *magnitude = matrix->magnitude + (size_t)r * cols;
        double sum = 0, terms = 0, error = 0;
        for (int c = 0; c < cols; c++) {
            sum += weight[c] * input.value[c];
            terms += magnitude[c] * fabs(input.value[c]);
            if (input.error) error += magnitude[c] * input.error[c];
        }
        double bias = matrix->matrix.bias ? matrix->matrix.bias[r] : 0;
        y->value[r] = sum + bias;
        y->error[r] = error + share * (terms + fabs(bias));
    }
    if (codes) estimate_free(&input);
    if (turn.value) estimate_free(&turn);
}

/* y = x less its mean */
static void center(const estimate *x, int length, estimate *y) {
    double mean = 0, size = 0, doubt = 0;
    for (int i = 0; i < length; i++) {
        mean += x->value[i] / length, size += fabs(x->value[i]) / length;
        if (x->error) doubt += x->error[i] / length;
    }
    for (int i = 0; i < length; i++) {
        y->error[i] = (x->error ? x->error[i] : 0) + doubt + INNER * (size + fabs(x->value[i] - mean));
        y->value[i] = x->value[i] - mean;
    }
}

void plain_norm(const estimate *x, const moert_norm *norm, float factor, int length, estimate *y) {
    double squares = 0, doubt = 0;
    if (norm->bias) center(x, length, y), x = y;
    for (int i = 0; i < length; i++) {
        squares += x->value[i] * x->value[i];
        if (x->error) doubt += 2 * fabs(x->value[i]) * x->error[i] + x->error[i] * x->error[i];
    }
    double turn = 1 / sqrt(squares / length + norm->eps), share = INNER + doubt / (squares + length * (double)norm->eps);
    for (int i = 0; i < length; i++) {
        double by = turn * norm->weight[i] * factor, error = x->error ? x->error[i] * fabs(by) : 0;
        y->value[i] = x->value[i] * by;
        y->error[i] = share * fabs(y->value[i]) + error;
        if (!norm->bias) continue;
        y->value[i] += norm->bias[i] * factor;
        y->error[i] += INNER * fabs(norm->bias[i] * factor);
    }
}

void plain_cap(estimate *x, float softcap, int length) {
    for (int i = 0; softcap > 0 && i < length; i++) {
        x->value[i] = softcap * tanh(x->value[i] / softcap);
        x->error[i] += 3e-7 * softcap;
    }
}

void plain_sigmoid(const estimate *x, int length, estimate *y) {
    for (int i = 0; i < length; i++) {
        y->error[i] = x->error[i] / 4;
        y->value[i] = 1 / (1 + exp(-x->value[i]));
        y->error[i] += INNER * y->value[i] * (1 + fabs(x->value[i])) + 1e-37; /* float32 ends there */
    }
}

static double activation_of(const moert_act *act, double x) {
    if (act->kind == MOERT_RELU) return x > 0 ? x : 0;
    if (act->kind == MOERT_RELU_SQUARED) return x > 0 ? x * x : 0;
    if (act->kind == MOERT_SILU) return x / (1 + exp(-act->slope * x));
    if (act->kind == MOERT_GELU) return 0.5 * x * (1 + erf(x * sqrt(0.5)));
    return 0.5 * x * (1 + tanh(sqrt(2 / acos(-1)) * (x + 0.044715 * x * x * x)));
}

void plain_activate(const moert_act *act, const estimate *gate, const estimate *up, int length, estimate *hidden) {
    const double limit = act->limit, bound = act->bound, most = fmin(limit, bound);
    for (int i = 0; i < length; i++) {
        const estimate *bent = gate ? gate : up;
        double input = fmin(bent->value[i], limit), u = 1, u_error = 0;
        double a = fmin(activation_of(act, input), bound), off = bent->error[i];
        double slope = act->kind == MOERT_RELU_SQUARED ? 2 * fabs(input) + off : 1.2; /* at most */
        double a_error = slope * off + 3e-7 * fabs(input) + INNER * fabs(a);
        if (gate) {
            u = fmax(fmin(up->value[i], most), -most) + act->plus;
            u_error = up->error[i] + INNER * fabs(act->plus);
        }
        hidden->value[i] = a * u;
        hidden->error[i] = a_error * fabs(u) + (fabs(a) + a_error) * u_error + INNER * fabs(a * u);
    }
}
