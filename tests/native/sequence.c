/* Tokens of a sequence through attention of either kind, at once and in pieces. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attend.h"

const moert_heads *sequence_heads(const sequence *s) { return s->latent ? &s->latent->heads : &s->heads->heads; }

/* Cosines and sines of angles that are known by the tangent of their half. */
static float *draw_turns(int tokens, int dims) {
    float *turns = claim((size_t)(tokens * dims) * sizeof *turns);
    for (int t = 0; t < tokens; t++)
        for (int i = 0; i < dims / 2; i++) {
            double half = 2 * draw_float();
            turns[t * dims + i] = (float)((1 - half * half) / (1 + half * half));
            turns[t * dims + dims / 2 + i] = (float)(2 * half / (1 + half * half));
        }
    return turns;
}

/* For all distances from a query to a key that it sees. */
static void draw_bias(sequence *s) {
    const moert_heads *h = sequence_heads(s);
    int after = h->causal || s->length - 1 < s->start ? 0 : s->length - 1 - s->start;
    for (int at = s->start; at < s->start + s->tokens; at++) {
        int before = at - (h->causal ? plain_first(h, at, at + 1) : 0);
        s->bias_middle = before > s->bias_middle ? before : s->bias_middle;
    }
    s->bias_stride = s->bias_middle + 1 + after;
    s->bias = draw_floats(h->n * s->bias_stride);
}

void draw_heads(sequence *s, moert_heads *heads) {
    s->tokens = PICK(1, 1, 1, 2, 3, 5, 17, 63, 64, 66), s->start = PICK(0, 0, 0, 1, 5, 62, 63, 64, 65, 127, 128);
    heads->causal = draw(4) > 0;
    heads->window = heads->causal && draw(2) ? PICK(1, 5, 64, 70) : 0;
    heads->chunk = heads->causal && draw(3) == 0 ? PICK(1, 7, 64, 100) : 0;
    heads->softcap = draw(3) ? 0 : 3;
    if (draw(3) == 0) heads->sinks = draw_floats(heads->n);
    s->length = s->own || heads->causal ? s->start + s->tokens + (draw(4) ? 0 : draw(70)) : 1 + draw(200);
}

void draw_sequence(sequence *s) {
    s->x = draw_floats(s->tokens * s->d_model);
    if (s->rope_dims && draw(4)) s->turns = draw_turns(s->tokens, s->rope_dims);
    if (draw(2)) draw_bias(s);
    if (draw(3) == 0) s->query_scale = draw_floats(s->tokens);
    s->before = kept_make(sequence_heads(s), s->length, s->start, s->own ? s->start + s->tokens : s->start);
}

void sequence_free(sequence *s) {
    kept_free(&s->before);
    free(s->x), free(s->turns), free(s->bias), free(s->query_scale), free((void *)sequence_heads(s)->sinks);
}

static int attend(const sequence *s, const engine *on, int first, int stop, float *out, const kept *keys) {
    int length = s->own && sequence_heads(s)->causal ? s->start + stop : s->length, tokens = stop - first;
    moert_positions at = {
        .turns = s->turns ? s->turns + first * s->rope_dims : NULL,
        .bias = s->bias ? s->bias + s->bias_middle : NULL,
        .bias_stride = s->bias_stride,
        .query_scale = s->query_scale ? s->query_scale + first : NULL,
    };
    float *x = out + first * s->d_model;
    if (s->latent) return moert_attend_latent(on->pool, s->latent, tokens, x, &keys->at, s->start + first, length, &at);
    return moert_attend(on->pool, s->heads, tokens, x, &keys->at, s->start + first, length, &at);
}

/* 1 .. most tokens at a time; `out` takes what comes out. */
static void run_pieces(const sequence *s, const engine *on, int most, kept *keys, float *out) {
    memcpy(out, s->x, (size_t)(s->tokens * s->d_model) * sizeof *out);
    for (int t = 0, stop; t < s->tokens; t = stop) {
        int n = most < s->tokens ? 1 + draw(most) : s->tokens;
        stop = t + n < s->tokens ? t + n : s->tokens;
        require(on, !attend(s, on, t, stop, out, keys), "no memory");
    }
}

/* In pieces of `most` tokens: the same bits. Where a token sees later ones too, their keys must be there before. */
static void run_again(const sequence *s, const engine *on, int most, const kept *found, const float *expected) {
    float *out = claim((size_t)(s->tokens * s->d_model) * sizeof *out);
    kept keys = kept_copy(sequence_heads(s)->causal ? &s->before : found);
    run_pieces(s, on, most, &keys, out);
    again(on, most == 1 ? "output of one token" : "output of a piece", out, expected, s->tokens * s->d_model);
    require(on, kept_equal(&keys, found), "other keys or values in pieces");
    kept_free(&keys);
    free(out);
}

void run_sequence(const sequence *s, const reading *r, const estimate *expected) {
    int length = s->tokens * s->d_model, stop = s->own ? s->start + s->tokens : s->start;
    float *out = claim((size_t)length * sizeof *out), *first_out = claim((size_t)length * sizeof *first_out);
    kept first = {0};
    for (int e = 0; e < engine_count; e++) {
        const engine *on = &engines[e];
        kept found = kept_copy(&s->before);
        run_pieces(s, on, s->tokens, &found, out);
        kept_check(on, &found, &s->before, s->start, stop, &r->keys, &r->values);
        check(on, "output", out, expected, length);
        if (!e) first = kept_copy(&found);
        require(on, kept_equal(&found, &first), "keys or values differ from the first engine's");
        agree(on, "output", out, first_out, length, r->heads->softcap > 0 ? HERE : EVERYWHERE);
        if (s->tokens > 1) run_again(s, on, e % 2 ? 1 : s->tokens / 2 + 1, &found, out);
        kept_free(&found);
    }
    kept_free(&first);
    free(out), free(first_out);
}
