/* The arithmetic of a pack's matrices: plain C, no Python, loaded with ctypes (native.py).
 *
 * Every function takes the pack's bytes as they lie on disk (pack/SPEC.md, section 3). Codes are multiplied with
 * activations that were rounded to 8 bits in blocks of MOERT_BLOCK inputs, one float scale a block: exact integers
 * inside a block, float32 sums between them. Floats (16 or 32 bits) are multiplied as they are.
 *
 * A pool is used by one thread at a time. Functions that return int give 0, or -1 if memory ran out, or if matrices with
 * the same input have more than 8 different group sizes.
 */
#ifndef MOERT_H
#define MOERT_H

#include <stdint.h>

#define MOERT_ABI 2
#define MOERT_BLOCK 32

/* Kinds of matrix beside the widths 2, 3, 4 and 8. */
enum { MOERT_F16 = 16, MOERT_BF16 = 17, MOERT_F32 = 32 };

enum { MOERT_RELU, MOERT_SILU, MOERT_GELU, MOERT_GELU_TANH };

#pragma GCC visibility push(default)

typedef struct {
    const void *data;         /* codes [rows, row_bytes] or floats [rows, cols] */
    const uint16_t *scale;    /* float16 [rows, groups]; NULL for floats */
    const uint16_t *minimum;  /* the same */
    int32_t kind;
    int32_t rows, cols;
    int32_t group;            /* inputs that share a scale; cols: one scale a row */
} moert_matrix;

/* down(act(up x)), or with a gate down(act(gate x) * up x). gate.data is NULL without one. */
typedef struct {
    moert_matrix gate, up, down;
} moert_ffn;

typedef struct {
    const float *norm;        /* [d_model], RMS norm before q, k, v */
    const float *q_norm;      /* [heads * head_dim] or NULL: norms over whole q and k */
    const float *k_norm;      /* [kv_heads * head_dim] or NULL */
    moert_matrix q, k, v, o;  /* k.data and v.data are NULL where keys and values are given (cross attention) */
    int32_t heads, kv_heads, head_dim;
    float eps, scale, clip;   /* clip: q, k, v are clamped to ±clip; infinity for none */
} moert_attention;

typedef struct moert_pool moert_pool;

int moert_abi(void);

/* Instruction sets compiled into this library, best first, and whether this processor has them. */
int moert_isa_count(void);
const char *moert_isa_name(int isa);
int moert_isa_runs(int isa);

/* threads includes the calling one. NULL if memory or threads ran out, or for an instruction set that does not run. */
moert_pool *moert_pool_open(int isa, int threads);
void moert_pool_close(moert_pool *pool);

/* outputs[i] [tokens, matrices[i].rows] = x [tokens, cols] · matrices[i]ᵀ, for count matrices with the same cols. */
int moert_linear(moert_pool *pool, int count, const moert_matrix *const *matrices, const float *x, int tokens,
                 float *const *outputs);

/* out [count, cols]: rows of a matrix as floats. */
int moert_rows(moert_pool *pool, const moert_matrix *matrix, int count, const int64_t *rows, float *out);

/* out [tokens, d_model] += the mixture. Expert e runs the rows starts[e] .. starts[e + 1] - 1; row r is token
 * token_of[r] with weight weight_of[r]. The experts are added in the order given. limit: the gate is clamped to
 * at most limit and up to ±limit (without a gate: up to at most limit); infinity for none. */
int moert_mixture(moert_pool *pool, int activation, float limit, int experts, const moert_ffn *const *ffn,
                  const int32_t *starts, const int32_t *token_of, const float *weight_of, const float *x, int tokens,
                  float *out);

/* The same in two steps, where experts come one after the other. parts [rows, d_model]: what the expert of each row makes
 * of its token; and out [tokens, cols] += weight_of[r] * parts[r] for each row, in order. */
int moert_parts(moert_pool *pool, int activation, float limit, int experts, const moert_ffn *const *ffn,
                const int32_t *starts, const int32_t *token_of, const float *x, int tokens, float *parts);
void moert_add_parts(moert_pool *pool, const float *parts, const float *weight_of, const int32_t *token_of, int rows,
                     int cols, float *out);

/* One token through an attention block: x [d_model] += o · attention(norm(x)).
 * keys, values [kv_heads, ≥ length, head_dim] with head_stride floats from head to head; with k and v, row
 * length - 1 is written here. turn: cos and signed sin [2, head_dim] of rotary positions, or NULL. bias [heads, length]
 * with bias_stride floats from head to head, or NULL. */
int moert_attend(moert_pool *pool, const moert_attention *attention, float *x, float *keys, float *values,
                 int64_t head_stride, int length, const float *turn, const float *bias, int64_t bias_stride);

/* hidden [d_model] = norm(x); the top_k largest of softmax(router · hidden): experts ascending by number, with their
 * probabilities, divided by their sum if renormalise. */
int moert_route(moert_pool *pool, const float *norm, float eps, const moert_matrix *router, const float *x, int top_k,
                int renormalise, float *hidden, int64_t *experts, float *weights);

/* y [matrix.rows] = matrix · (norm(x) * factor) */
int moert_head(moert_pool *pool, const float *norm, float eps, float factor, const moert_matrix *matrix,
               const float *x, float *y);

#pragma GCC visibility pop

#endif
