/* Random matrices as a pack stores them (moert/pack/SPEC.md, section 3), and norms. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "problem.h"

static uint64_t state = 1;

void seed(uint64_t value) { state = value * 0x9E3779B97F4A7C15ull + 1; }

int draw(int below) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (int)((state >> 33) % (uint64_t)below);
}

float draw_float(void) {
    float uniform = (float)draw(1 << 20) / (float)(1 << 19) - 1;
    return draw(8) ? uniform : 2 * uniform;
}

void *claim(size_t bytes) {
    void *found = malloc(bytes ? bytes : 1);
    if (!found) {
        fprintf(stderr, "no memory\n");
        exit(2);
    }
    return found;
}

float *draw_floats(int length) {
    float *values = claim((size_t)length * sizeof *values);
    for (int i = 0; i < length; i++) values[i] = draw_float();
    return values;
}

double half_value(uint16_t half) {
    int exponent = half >> 10 & 31, fraction = half & 1023;
    double size = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
    return half & 0x8000 ? -size : size;
}

uint16_t draw_half(int style) {
    static const uint16_t ends[] = {0x0000, 0x0001, 0x03FF, 0x0400, 0x7BFF, 0x8001, 0xFBFF};
    if (style == EXTREME && draw(4) == 0) return ends[draw(7)];
    int sign = draw(2), exponent = 8 + draw(8), fraction = draw(1024);
    return (uint16_t)(sign << 15 | exponent << 10 | fraction);
}

static int row_bytes(int kind, int cols) {
    if (kind == 3) return (cols + 3) / 4 + (cols + 7) / 8;
    return (cols * kind + 7) / 8;
}

static void put_bits(uint8_t *row, int width, int index, int code) {
    for (int bit = 0; bit < width; bit++) {
        int place = index * width + bit;
        row[place / 8] |= (uint8_t)((code >> bit & 1) << place % 8);
    }
}

static void put_code(uint8_t *row, int kind, int cols, int index, int code) {
    if (kind != 3) {
        put_bits(row, kind, index, code);
        return;
    }
    put_bits(row, 2, index, code & 3);
    put_bits(row + (cols + 3) / 4, 1, index, code >> 2);
}

static void fill_codes(problem_matrix *made, int style) {
    moert_matrix *m = &made->matrix;
    int stride = row_bytes(m->kind, m->cols), groups = (m->cols + m->group - 1) / m->group;
    uint8_t *data = claim((size_t)m->rows * stride);
    uint16_t *scale = claim((size_t)m->rows * groups * 2), *minimum = claim((size_t)m->rows * groups * 2);
    memset(data, 0, (size_t)m->rows * stride);
    for (int i = 0; i < m->rows * groups; i++) {
        scale[i] = style >= UNIT ? 0x3C00 : draw_half(style);
        minimum[i] = style == UNIT ? 0xC000 : style == SELECT ? 0 : draw_half(style);
    }
    for (int r = 0; r < m->rows; r++) {
        int same = draw(6) ? -1 : draw(2) ? 0 : (1 << m->kind) - 1; /* now and then a row of equal, outermost codes */
        for (int c = 0; c < m->cols; c++) {
            int code = style == SELECT ? c == r % m->cols : same >= 0 ? same : draw(1 << m->kind);
            double s = half_value(scale[r * groups + c / m->group]), n = half_value(minimum[r * groups + c / m->group]);
            put_code(data + (size_t)r * stride, m->kind, m->cols, c, code);
            made->weight[r * m->cols + c] = s * code + n;
            made->magnitude[r * m->cols + c] = fabs(s) * code + fabs(n);
        }
    }
    m->data = data, m->scale = scale, m->minimum = minimum;
}

/* MXFP4: a power of two for each group, and values of E2M1. */
static void fill_mxfp4(problem_matrix *made, int style) {
    static const double values[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    static const uint8_t ends[] = {1, 2, 3, 90, 140};
    moert_matrix *m = &made->matrix;
    int stride = (m->cols + 1) / 2, groups = (m->cols + m->group - 1) / m->group;
    uint8_t *data = claim((size_t)m->rows * stride), *scale = claim((size_t)m->rows * groups);
    memset(data, 0, (size_t)m->rows * stride);
    for (int i = 0; i < m->rows * groups; i++) {
        scale[i] = (uint8_t)(style >= UNIT ? 128 : 121 + draw(8));
        if (style == EXTREME && draw(4) == 0) scale[i] = ends[draw(5)];
    }
    for (int r = 0; r < m->rows; r++) {
        int same = draw(6) ? -1 : PICK(0, 7, 15);
        for (int c = 0; c < m->cols; c++) {
            int code = style == SELECT ? c == r % m->cols : same >= 0 ? same : draw(16);
            double s = ldexp(1, scale[r * groups + c / m->group] - 127);
            put_bits(data + (size_t)r * stride, 4, c, code);
            made->weight[r * m->cols + c] = (code & 8 ? -s : s) * values[code & 7];
            made->magnitude[r * m->cols + c] = s * (values[code & 7] + 12);
        }
    }
    m->data = data, m->scale = (const uint16_t *)scale, m->minimum = NULL;
}

/* What a trellis code's pair is, in plain arithmetic (SPEC.md, section 3). */
static void trellis_pair(const uint8_t *stream, int step, int64_t number, double *pair) {
    static const int upper[2][32] = {{2, 6, 10, 15, 20, 24, 29, 34, 40, 44, 52, 60, 68, 78, 95, 127},
        {1, 3, 4, 7, 8, 10, 13, 14, 17, 19, 21, 23, 25, 27, 29, 32, 34, 36, 39, 41, 44, 48, 52, 54, 59, 62, 67, 72, 79, 88, 102, 127}};
    int window = 0, fine = step == 8, half = fine ? 32 : 16, bits = fine ? 6 : 5;
    for (int i = 0; i < 12; i++) window |= (stream[(number * step + i) / 8] >> (number * step + i) % 8 & 1) << i;
    int mixed = window * (fine ? 20591 : 19503) & 0xFFFF;
    for (int i = 0; i < 2; i++) {
        int place = mixed >> (16 - (i + 1) * bits) & (2 * half - 1);
        pair[i] = place < half ? -upper[fine][half - 1 - place] : upper[fine][place - half];
    }
}

static void fill_trellis(problem_matrix *made, int style) {
    moert_matrix *m = &made->matrix;
    int step = -m->kind, pairs = (m->cols + 1) / 2;
    int64_t bytes = 0;
    for (int row = 0; row < m->rows; row += 128) {
        int rows = m->rows - row < 128 ? (m->rows - row + 7) / 8 * 8 : 128;
        bytes += (int64_t)pairs * rows * step / 8 + 2;
    }
    uint8_t *data = claim((size_t)bytes);
    uint16_t *scale = claim((size_t)m->rows * 2);
    for (int64_t i = 0; i < bytes; i++) data[i] = (uint8_t)draw(256);
    for (int r = 0; r < m->rows; r++) scale[r] = draw_half(style);
    int64_t start = 0;
    for (int row = 0; row < m->rows; row += 128) {
        int rows = m->rows - row < 128 ? (m->rows - row + 7) / 8 * 8 : 128;
        for (int p = 0; p < pairs; p++)
            for (int r = 0; r < rows && row + r < m->rows; r++) {
                double pair[2], s = half_value(scale[row + r]);
                trellis_pair(data + start, step, (int64_t)p * rows + r, pair);
                for (int i = 0; i < 2 && 2 * p + i < m->cols; i++) {
                    made->weight[(row + r) * m->cols + 2 * p + i] = s * pair[i];
                    made->magnitude[(row + r) * m->cols + 2 * p + i] = fabs(s) * (128 + 128 + pair[i]);
                }
            }
        start += (int64_t)pairs * rows * step / 8 + 2;
    }
    m->data = data, m->scale = scale, m->minimum = NULL;
}

static void fill_floats(problem_matrix *made, int style) {
    moert_matrix *m = &made->matrix;
    int count = m->rows * m->cols;
    void *data = claim((size_t)count * (m->kind == MOERT_F32 ? 4 : 2));
    for (int i = 0; i < count; i++) {
        float whole = draw(16) ? draw_float() : 0;
        uint16_t half = draw_half(style);
        uint32_t bits;
        memcpy(&bits, &whole, 4);
        if (m->kind == MOERT_F16) ((uint16_t *)data)[i] = half;
        if (m->kind == MOERT_BF16) {
            ((uint16_t *)data)[i] = (uint16_t)(bits >> 16);
            bits &= 0xFFFF0000u;
            memcpy(&whole, &bits, 4);
        }
        if (m->kind == MOERT_F32) ((float *)data)[i] = whole;
        made->weight[i] = m->kind == MOERT_F16 ? half_value(half) : whole;
        made->magnitude[i] = fabs(made->weight[i]);
    }
    m->data = data, m->scale = NULL, m->minimum = NULL;
}

problem_matrix matrix_make(int kind, int rows, int cols, int group, int style) {
    size_t bytes = (size_t)rows * cols * sizeof(double);
    problem_matrix made = {.weight = claim(bytes), .magnitude = claim(bytes)};
    made.matrix.kind = kind, made.matrix.rows = rows, made.matrix.cols = cols;
    made.matrix.group = group && group < cols ? group : cols;
    if (kind == MOERT_MXFP4) fill_mxfp4(&made, style);
    else if (kind < 0) made.matrix.group = cols, fill_trellis(&made, style);
    else if (kind <= 8) fill_codes(&made, style);
    else fill_floats(&made, style);
    if (style < UNIT && draw(3) == 0) made.matrix.bias = draw_floats(rows);
    return made;
}

problem_matrix matrix_rows(const problem_matrix *from, int first, int count) {
    problem_matrix part = *from;
    size_t at = (size_t)first * from->matrix.cols;
    part.matrix.data = part.matrix.scale = part.matrix.minimum = NULL, part.matrix.rows = count;
    part.weight += at, part.magnitude += at;
    if (part.matrix.bias) part.matrix.bias += first;
    return part;
}

void matrix_free(problem_matrix *made) {
    free((void *)made->matrix.data);
    free((void *)made->matrix.scale);
    free((void *)made->matrix.minimum);
    free((void *)made->matrix.bias);
    free(made->weight);
    free(made->magnitude);
    memset(made, 0, sizeof *made);
}

moert_norm norm_make(int length, float eps) {
    moert_norm made = {draw_floats(length), NULL, eps};
    if (draw(3) == 0) made.bias = draw_floats(length);
    return made;
}

void norm_free(moert_norm *norm) {
    free((void *)norm->weight), free((void *)norm->bias);
    *norm = (moert_norm){0};
}
