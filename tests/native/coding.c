/* moert_code_inputs. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"

typedef struct {
    moert_feedback f;
    float *values, *factor, *scale, *minimum, *before; /* before: the codes that there were */
    int32_t *group;
    int length;
} problem;

static problem make(int inputs, int columns, int improves) {
    const int groups = 1 + draw(inputs), top = PICK(3, 7, 15, 255), stride = columns + draw(3), across = inputs + draw(3);
    problem p = {.length = inputs * stride};
    p.values = draw_floats(p.length), p.factor = draw_floats(inputs * across);
    p.scale = draw_floats(groups * columns), p.minimum = draw_floats(groups * columns);
    p.group = claim((size_t)inputs * sizeof *p.group), p.before = claim((size_t)p.length * sizeof *p.before);
    for (int j = 0; j < inputs; j++) {
        p.group[j] = draw(groups);
        p.factor[j * across + j] = 0.5f + fabsf(p.factor[j * across + j]);
    }
    for (int i = 0; i < groups * columns; i++) p.scale[i] = draw(9) ? 0.01f + fabsf(p.scale[i]) : 0;
    for (int i = 0; i < p.length; i++) p.before[i] = (float)draw(top + 1);
    p.f = (moert_feedback){p.values, p.factor, p.scale, p.minimum, p.group, NULL, NULL, stride, across, inputs, columns,
                           improves, (float)top};
    return p;
}

static int isa_of(const engine *on) {
    int isa = 0;
    while (strcmp(moert_isa_name(isa), on->isa)) isa++;
    return isa;
}

/* One code, by what was found for the inputs before it. */
static void check_one(const engine *on, const problem *p, int j, int c, estimate *moved) {
    const moert_feedback *f = &p->f;
    const int64_t at = j * f->stride + c, of = (int64_t)p->group[j] * f->columns + c;
    const double scale = p->scale[of], minimum = p->minimum[of], step = scale > 0 ? scale : 1;
    const double root = p->factor[j * f->across + j], code = f->codes[at];
    double value = p->values[at], size = fabs(value);
    for (int i = 0; i < j; i++) {
        const double part = (double)p->factor[i * f->across + j] * f->moved[i * f->stride + c];
        value -= part, size += fabs(part);
    }
    const double off = size * INNER, held = p->before[at];
    const double wanted = f->improves ? value / step / root + held : (value - minimum) / step;
    const double unsure = f->improves ? off / step / root + INNER * held : (off + INNER * fabs(minimum)) / step;
    const double nearest = fmin(fmax(wanted, 0), f->top);
    require(on, code >= 0 && code <= f->top && code == rint(code), "a code is none");
    require(on, fabs(code - nearest) <= 0.5 + unsure + INNER * fabs(nearest), "a code is not the nearest");
    moved->value[c] = f->improves ? (code - held) * scale : (minimum + code * scale - value) / -root;
    moved->error[c] = f->improves ? INNER * fabs(moved->value[c])
                                  : (off + INNER * (fabs(minimum) + code * scale)) / root + INNER * fabs(moved->value[c]);
}

static void run(const engine *on, problem *p, float *codes_first, float *moved_first) {
    const int inputs = p->f.inputs, columns = p->f.columns;
    p->f.codes = claim((size_t)p->length * sizeof(float)), p->f.moved = claim((size_t)p->length * sizeof(float));
    memcpy(p->f.codes, p->before, (size_t)p->length * sizeof(float));
    memset(p->f.moved, 0, (size_t)p->length * sizeof(float));
    moert_code_inputs(isa_of(on), &p->f);
    estimate moved = estimate_make(columns);
    for (int j = 0; j < inputs; j++) {
        const int64_t at = j * p->f.stride;
        for (int c = 0; c < columns; c++) check_one(on, p, j, c, &moved);
        check(on, "moved", p->f.moved + at, &moved, columns);
        for (int c = columns; c < p->f.stride; c++)
            require(on, p->f.codes[at + c] == p->before[at + c] && p->f.moved[at + c] == 0, "written beyond the columns");
    }
    agree(on, "codes", p->f.codes, codes_first, p->length, EVERYWHERE);
    agree(on, "moved", p->f.moved, moved_first, p->length, EVERYWHERE);
    estimate_free(&moved);
    free(p->f.codes), free(p->f.moved);
}

void coding_cases(void) {
    for (int number = 0; number < 60; number++) {
        seed(9100 + (uint64_t)number);
        const int inputs = PICK(1, 2, 7, 31, 32), columns = PICK(1, 3, 8, 63, 64, 65, 130, 200);
        problem p = make(inputs, columns, number % 2);
        float *codes = claim((size_t)p.length * sizeof *codes), *moved = claim((size_t)p.length * sizeof *moved);
        describe("coding: %d inputs, %d columns, codes up to %g, %s", inputs, columns, p.f.top,
                 p.f.improves ? "improved" : "made");
        for (int e = 0; e < engine_count; e++) run(&engines[e], &p, codes, moved);
        free(codes), free(moved);
        free(p.values), free(p.factor), free(p.scale), free(p.minimum), free(p.group), free(p.before);
    }
}
