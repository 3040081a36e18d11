/* The arithmetic of a pack's matrices: plain C, no Python, loaded with ctypes (native.py).
 *
 * Every function takes the pack's bytes as they lie on disk (pack/SPEC.md, section 3). Codes are multiplied with
 * activations that were rounded to 8 bits in blocks of inputs (moert_block), one float scale a block: exact integers
 * inside a block, float32 sums between them. Floats (16 or 32 bits) are multiplied as they are.
 *
 * A pool is used by one thread at a time. Functions that return int give 0, or -1 if memory ran out, or if matrices with
 * the same input have more than 8 different group sizes.
 */
#ifndef MOERT_H
#define MOERT_H

#include <stdint.h>

#define MOERT_ABI 22
#define MOERT_KEYS 64 /* keys that lie together */

/* Kinds of matrix beside the widths 2, 3, 4 and 8. Of MXFP4, scale is 8-bit powers of two, minimum is not there, and group is
 * 32 (or cols). Below 0 are trellis codes: minus the bits of two inputs, 2, 3, 4, 5, 6 or 8; data is the blocks of all rows, one
 * behind the other, minimum is not there, and group is cols. */
enum { MOERT_MXFP4 = 5, MOERT_F16 = 16, MOERT_BF16 = 17, MOERT_F32 = 32 };

enum { MOERT_RELU, MOERT_SILU, MOERT_GELU, MOERT_GELU_TANH, MOERT_RELU_SQUARED };
enum { MOERT_SOFTMAX, MOERT_SIGMOID, MOERT_SIGMOID_OF_CHOSEN, MOERT_SPARSEMIXER, MOERT_SQRT_SOFTPLUS };

#pragma GCC visibility push(default)

typedef struct {
    const void *data;         /* codes [rows, row_bytes] or floats [rows, cols] */
    const uint16_t *scale;    /* float16 [rows, groups]; NULL for floats */
    const uint16_t *minimum;  /* the same */
    const float *bias;        /* [rows], added to what the matrix gives; or NULL */
    int32_t kind;
    int32_t rows, cols;
    int32_t group;            /* inputs that share a scale; cols: one scale a row */
    int32_t block_rows;       /* rows of a block, where they lie in blocks; the last may have fewer */
    int32_t power;            /* of two, which the weights are multiplied with: -126 to 127 */
    const int64_t *blocks;    /* or NULL: of each block, bytes that all of the above lie further on; -1: it is not there, and
                               * what the matrix gives for its rows is 0 */
} moert_matrix;

/* x / sqrt(mean(x²) + eps) * weight; with a bias, the mean is taken from x before, and the bias added. Where the weight is
 * NULL there is no norm, and x stays as it is. */
typedef struct {
    const float *weight, *bias; /* [n] */
    float eps;
} moert_norm;

/* act(gate) * (up + plus), or act(up). The gate is clamped to at most limit and up to ±limit, without a gate up to at most
 * limit; what act gives is clamped to at most bound, and up beside a gate to ±bound; infinity for none. SiLU is
 * x * sigmoid(slope * x). */
typedef struct {
    int32_t kind;
    float limit, slope, plus, bound;
} moert_act;

/* down(act(up x)), or with a gate down(act(gate x) * up x). gate.data is NULL without one. */
typedef struct {
    moert_matrix gate, up, down;
} moert_ffn;

/* What heads do with queries, keys and values. */
typedef struct {
    const float *sinks;       /* [n]: a score that takes part in the softmax and has no value; or NULL */
    int32_t n, kv;            /* heads of queries, and of keys and values */
    int32_t dim, value_dim;   /* features of a query or key, and of a value */
    int32_t causal;
    int32_t window;           /* keys that a query sees at most, itself among them; 0: all */
    int32_t chunk;            /* a query sees none before the last multiple of this; 0: all */
    float scale;
    float softcap;            /* scores become softcap * tanh(score / softcap); 0: none */
} moert_heads;

typedef struct {
    moert_heads heads;
    moert_norm norm;          /* before q, k, v: d_model */
    moert_norm q_norm, k_norm;/* optional, of all heads as one vector, or with norm_each of each head */
    moert_norm v_norm;        /* optional, of each head */
    moert_norm after;         /* optional, of what comes out: d_model */
    moert_matrix q, k, v, o;  /* k.data and v.data are NULL where keys and values are there already (cross attention) */
    moert_matrix gate;        /* what the heads give is multiplied with sigmoid(gate · norm(x)), of as many rows or one a
                               * head; data NULL: none */
    int32_t rope_dims;        /* the first features of each head turn, in two halves; 0: none */
    int32_t norm_each, norm_turned; /* the latter: queries and keys are normed after they turn */
    float clip;               /* q, k, v are clamped to ±clip; infinity for none */
    float add;                /* x += add * what comes out */
} moert_attention;

/* Attention to a few features of each token instead of keys and values (DeepSeek-V2's report, section 2.1): all heads see
 * c = norm(kv_a · h) and a key that turns, k = rope(k_turn · h). A head's query of nope features becomes one of c's
 * features by keys, what it reads of c becomes value features by values, times sigmoid(gate · h). heads: kv 1, dim c's
 * features + rope_dims, value_dim c's features. */
typedef struct {
    moert_heads heads;
    moert_norm norm, after;   /* as in moert_attention */
    moert_norm q_norm;        /* of what q_a gives */
    moert_norm kv_norm;
    moert_matrix q_a;         /* before q and q_turn; data NULL: none */
    moert_matrix q, q_turn;   /* [n * nope, ...], [n * rope_dims, ...] */
    moert_matrix kv_a, k_turn;/* [c, d_model], [rope_dims, d_model] */
    moert_matrix keys, values;/* [n * c, nope], [n * v, c] */
    moert_matrix o;           /* [d_model, n * v] */
    moert_matrix gate;        /* [n, d_model]; data NULL: none */
    int32_t rope_dims;
    float add;
} moert_latent;

/* Where the tokens stand that are read. */
typedef struct {
    const float *turns;       /* [tokens, 2, rope_dims / 2], cosines and sines; or NULL */
    const float *bias;        /* or NULL: for head h, bias[h * bias_stride + d] is that of a key d places after the query */
    int64_t bias_stride;
    const float *query_scale; /* [tokens], or NULL: queries are multiplied with it */
} moert_positions;

/* Which experts a token goes to. Scores are the softmax, sigmoid or √softplus of matrix · norm(x), or for MOERT_SPARSEMIXER
 * these numbers themselves. The best are chosen by score + choice_bias, of the best groups alone where there are groups, each
 * as good as the sum of its `group_top` best. Their scores are the weights: divided by their sum if renormalise, times
 * factor. MOERT_SIGMOID_OF_CHOSEN chooses by these numbers too, and their sigmoids are the weights. The sparse mixer
 * (Liu et al. 2023) chooses one after the other, with the softmax over those that are no further below the best left than
 * 2 * jitter of it. */
typedef struct {
    moert_norm norm;
    moert_norm own;           /* optional: what the matrix gets is this norm of x, and not what the experts get */
    moert_matrix matrix;
    const float *choice_bias; /* [experts], or NULL */
    const float *expert_scale;/* [experts]: factors of their weights, or NULL */
    int32_t score, top_k, renormalise;
    int32_t groups, best_groups, group_top; /* groups 0: none */
    float factor, jitter;
} moert_router;

/* Keys and values of a layer, in pages of MOERT_KEYS tokens each. Of each head, `head` bytes behind the one before: keys
 * [head_dim][MOERT_KEYS], and so many bytes further on values [MOERT_KEYS][value_dim]. Numbers are float16, or if `small`, of 8
 * bits with a sign; times the float32 step of their token: key_steps and value_steps [MOERT_KEYS]. Steps of float16 are powers
 * of two, 1 where the largest of the numbers needs no other; of a token with a number that is not finite they are NaN. */
typedef struct {
    void *const *pages;       /* in the order of the tokens, each aligned for float32 */
    int64_t head, values, key_steps, value_steps;
    int32_t small;
} moert_keys;

/* A short convolution: of each channel, the last k inputs times taps, the oldest first, and bias. */
typedef struct {
    const float *taps;        /* [k, channels] */
    const float *bias;        /* [channels], or NULL */
    int32_t channels, k;
    int32_t silu;             /* what comes out goes through SiLU */
} moert_taps;

/* The gated delta rule (Yang et al. 2024, section 3). k and q are scaled to length 1, q then by 1 / sqrt(dk). For each token,
 * and each head's S [dk, dv]: S *= e^decay, in each row its own if `each` is dk (Kimi Delta Attention, arXiv 2510.26692);
 * S += k (beta (v - Sᵀk))ᵀ; y = Sᵀq. `heads / key_heads` heads that follow one another share q and k. */
typedef struct {
    const float *q, *k;       /* [tokens, key_heads, dk] */
    const float *v;           /* [tokens, heads, dv] */
    const float *decay;       /* [tokens, heads, each] */
    const float *beta;        /* [tokens, heads] */
    float *state;             /* [heads, dk, dv] */
    float *y;                 /* [tokens, heads, dv] */
    int32_t tokens, key_heads, heads, dk, dv;
    int32_t each;             /* dk or 1 */
} moert_delta;

/* The scan of Mamba. For each token, and each head's S [p, n]: S = e^(dt a) S + dt x bᵀ; y = S c + d x. `heads / groups`
 * heads that follow one another share b and c. */
typedef struct {
    const float *x;           /* [tokens, heads, p] */
    const float *dt;          /* [tokens, heads] */
    const float *a;           /* [heads, each] */
    const float *b, *c;       /* [tokens, groups, n] */
    const float *d;           /* [heads] */
    float *state;             /* [heads, p, n] */
    float *y;                 /* [tokens, heads, p] */
    int32_t tokens, heads, groups, p, n;
    int32_t each;             /* n: each column of S decays in its own way; or 1 */
} moert_scan;

/* An LSTM (Hochreiter & Schmidhuber 1997). For each token, with gates (input, forget, cell, output) = inputs + h recurrent:
 * c = sigmoid(forget) c + sigmoid(input) tanh(cell); y = h = sigmoid(output) tanh(c). The rows of a sequence follow those of
 * the one before it, and are read from the last to the first where `backward`. */
typedef struct {
    const float *inputs;      /* [rows, 4 * width] */
    const float *recurrent;   /* [width, 4 * width] */
    const int32_t *counts;    /* [sequences]: rows of each */
    float *state;             /* [sequences, 2, width]: h and c */
    float *y;                 /* [rows, width] */
    int32_t sequences, width, backward;
} moert_lstm;

/* Attention to few keys: row r sees those from spans[r, 0] to spans[r, 1] - 1, and what it gets is the sum of their values
 * times sparsemax(query · key / sqrt(width)) (Martins & Astudillo 2016); 0 where it sees none. */
typedef struct {
    const float *queries;     /* [rows, width] */
    const float *keys, *values; /* [n, width] */
    const int32_t *spans;     /* [rows, 2] */
    float *y;                 /* [rows, width] */
    int32_t rows, width;
} moert_sparse;

/* A matrix within pieces that have one of its blocks each: what lies how many bytes behind a piece's beginning. */
typedef struct {
    int64_t data, scale, minimum;
    int64_t bias;             /* -1: none */
    int32_t kind, group, power; /* as in moert_matrix */
} moert_place;

/* A feed-forward by its neurons, in blocks of block_rows: each has a row of gate and up and a column of down. down is stored by
 * columns, [d_ff, d_model]: groups run along d_model. */
typedef struct {
    moert_place gate, up;     /* of a piece of rows; gate.kind is 0 without one */
    moert_place down;         /* of a piece of columns */
    int32_t d_model, d_ff, block_rows;
} moert_neurons;

typedef struct moert_pool moert_pool;

int moert_abi(void);

/* Inputs that are rounded with one scale, for matrices whose scales cover `group` of `cols` inputs: 32, or 64 where the
 * rows are long and no group ends within 64, or 16 where groups are a multiple of that alone. */
int moert_block(int cols, int group);

/* Instruction sets compiled into this library, best first, and whether this processor has them. */
int moert_isa_count(void);
const char *moert_isa_name(int isa);
int moert_isa_runs(int isa);

/* threads includes the calling one. NULL if memory or threads ran out, or for an instruction set that does not run. */
moert_pool *moert_pool_open(int isa, int threads);
void moert_pool_close(moert_pool *pool);

/* From any thread: what the pool does, and is asked to do, ends after the items that are begun, until `stopped` is 0 again.
 * What was to be computed is not. */
void moert_pool_stop(moert_pool *pool, int stopped);

/* outputs[i] [tokens, matrices[i].rows] = x [tokens, cols] · matrices[i]ᵀ, for count matrices with the same cols. */
int moert_linear(moert_pool *pool, int count, const moert_matrix *const *matrices, const float *x, int tokens,
                 float *const *outputs);

/* out [count, cols]: rows of a matrix as floats. */
int moert_rows(moert_pool *pool, const moert_matrix *matrix, int count, const int64_t *rows, float *out);

/* out [tokens, d_model] += the mixture. Expert e runs the rows starts[e] .. starts[e + 1] - 1; row r is token
 * token_of[r] with weight weight_of[r]. The experts are added in the order given. */
int moert_mixture(moert_pool *pool, const moert_act *act, int experts, const moert_ffn *const *ffn, const int32_t *starts,
                  const int32_t *token_of, const float *weight_of, const float *x, int tokens, float *out);

/* The same in two steps, where experts come one after the other. parts [rows, d_model]: what the expert of each row makes
 * of its token; and out [tokens, cols] += weight_of[r] * parts[r] for each row, in order. */
int moert_parts(moert_pool *pool, const moert_act *act, int experts, const moert_ffn *const *ffn, const int32_t *starts,
                const int32_t *token_of, const float *x, int tokens, float *parts);
void moert_add_parts(moert_pool *pool, const float *parts, const float *weight_of, const int32_t *token_of, int rows,
                     int cols, float *out);

/* hidden [tokens, d_ff]: act(up x), or with a gate act(gate x) * up x. Block k's piece of rows lies at[k] bytes behind base; -1:
 * it is not there, and its neurons get 0. */
int moert_fire(moert_pool *pool, const moert_neurons *neurons, const moert_act *act, const void *base, const int64_t *at,
               const float *x, int tokens, float *hidden);

/* y [tokens, d_model] = the sum of hidden[i] times column i, in the order of the neurons, with one rounding for each
 * (fma); column i is fl(fl(scale * code) + minimum); times 2^power. Then bias [d_model] (or NULL) is added. Neurons with 0 are skipped, which
 * is the same; pieces of columns lie as those of rows do. 1 if one is not there whose neuron has something else than 0. */
int moert_project(moert_pool *pool, const moert_neurons *neurons, const void *base, const int64_t *at, const float *hidden,
                  int tokens, const float *bias, float *y);

/* Tokens of one sequence through an attention block: x [tokens, d_model] += o · attention(norm(x)). They are those from
 * position `start` on; with k and v, their keys and values are written there first. `length` keys are there then. */
int moert_attend(moert_pool *pool, const moert_attention *attention, int tokens, float *x, const moert_keys *keys,
                 int start, int length, const moert_positions *at);
int moert_attend_latent(moert_pool *pool, const moert_latent *latent, int tokens, float *x, const moert_keys *keys,
                        int start, int length, const moert_positions *at);

/* Keys and values of encoded [tokens, d_model], which a decoder attends to, are written from position `start` on. */
int moert_keep(moert_pool *pool, const moert_attention *attention, int tokens, const float *encoded, int start,
               const moert_keys *keys);

/* y [tokens, n] = norm(x) of each */
void moert_normalise(moert_pool *pool, const moert_norm *norm, int tokens, int n, const float *x, float *y);

/* hidden [tokens, d_model] = norm(x), what the experts get; scores [tokens, experts] */
int moert_scores(moert_pool *pool, const moert_router *router, int tokens, const float *x, float *hidden, float *scores);

/* From scores [tokens, experts]: experts [tokens, top_k], ascending by number, the first of equal ones, with their
 * weights. */
int moert_choose(moert_pool *pool, const moert_router *router, const float *scores, int tokens, int64_t *chosen,
                 float *weights);

/* The same for one token, which prefers the experts in `recent` [k], the latest first and -1 behind the last: `bonus` is
 * added to what they are chosen by, once the `sure` best are taken. Those that are chosen come first in `recent` then. */
int moert_prefer(const moert_router *router, const float *scores, float bonus, int sure, int k, int32_t *recent,
                 int64_t *chosen, float *weights);

/* y [tokens] = factor * sigmoid(matrix · hidden), for a matrix of one row */
int moert_gate(moert_pool *pool, const moert_matrix *matrix, int tokens, const float *hidden, float factor, float *y);

/* y [tokens, matrix.rows] = matrix · (norm(x) * factor), bounded as in moert_heads by softcap */
int moert_head(moert_pool *pool, const moert_norm *norm, float factor, float softcap, const moert_matrix *matrix,
               int tokens, const float *x, float *y);

/* y [tokens, channels]. state [k - 1, channels]: the inputs before x, oldest first, which become those before what comes
 * next. */
void moert_convolve(moert_pool *pool, const moert_taps *with, int tokens, const float *x, float *state, float *y);

/* Tokens at once, or a few in each call, give the same numbers. */
int moert_delta_rule(moert_pool *pool, const moert_delta *rule);
int moert_scan_tokens(moert_pool *pool, const moert_scan *scan);

/* A sequence alone, or beside others, gets the same numbers; and so does a row. */
int moert_lstm_tokens(moert_pool *pool, const moert_lstm *lstm);
int moert_attend_sparsely(moert_pool *pool, const moert_sparse *sparse);

/* y [rows, n] = log(1 + e^(x + bias)); bias [n] */
void moert_softplus(moert_pool *pool, int rows, int n, const float *x, const float *bias, float *y);

/* y [n] = 1 / (1 + e^-x) */
void moert_sigmoid(moert_pool *pool, int64_t n, const float *x, float *y);

#define MOERT_MOST_STREAMS 64

/* The columns of each matrix [tokens, n, n], n at most MOERT_MOST_STREAMS, are divided by floor + their sum, then
 * `rounds` - 1 times its rows by floor + theirs, and its columns again. */
void moert_balance(moert_pool *pool, int tokens, int n, int rounds, float floor, float *matrices);

/* y [rows, n] = x * silu(gate). A norm without a bias is of each of `groups` parts of a row alone, of x or with `last` of
 * the product; NULL for none. */
void moert_gated(moert_pool *pool, const moert_norm *norm, int groups, int last, int rows, int n, const float *x,
                 const float *gate, float *y);

/* The CRC-32 of zlib, of more data after that whose checksum is `crc` (0: none), and whether it is fast here. */
uint32_t moert_crc32(uint32_t crc, const void *data, int64_t n);
int moert_crc32_fast(void);

/* What is known of experts, by row, and of layers, by place; and the rule by which they leave (moert/experts/policy): the
 * latest of use and loading; demands; those times how near the layer is, -1 for what leaves first; how long until the next
 * demand is to be expected. */
enum { MOERT_RECENCY, MOERT_FREQUENCY, MOERT_NEARNESS, MOERT_WAIT };
typedef struct {
    int64_t rows, steps;
    const int64_t *place, *order, *frequency, *last_used, *loaded_at, *last_visit, *nbytes; /* [rows] */
    const double *recent;                                     /* [rows] */
    const int64_t *visits;                                    /* [places] */
    const double *visited_at, *interval;                      /* [places] */
    const int64_t *nearness;                                  /* [places] */
    const double *following;                                  /* [places, experts], not a number: unknown; or NULL */
    const double *forgotten;                                  /* [forgotten_n]: what is left after so many visits */
    int64_t forgotten_n;                                      /* none is left after more */
    double remembered;                                        /* the share of a mean that forgets */
    int32_t rule, experts;
} moert_residents;

/* Of those rows that are `free`, who leaves until no bytes are missing: how many do, their rows in order in `leaving`. Both
 * that and `worth` have room for all rows. */
int64_t moert_leave(const moert_residents *all, const uint8_t *free, int64_t missing, double *worth, int64_t *leaving);

/* A fence around a mapping of a file: while it stands, what the file lacks or its drive does not give reads as zeros. Its
 * number, or -1: none can be had. The mapping outlives it. */
int moert_fence(const void *start, int64_t nbytes);
void moert_fence_end(int fence);

/* Whether zeros were read within it; and how often that has begun anywhere. */
int moert_fence_broken(int fence);
int64_t moert_fences_broken(void);
/* What experts cost that a device or the processor may compute (moert/beside/gpu/placement.py), in seconds. Of each kind: of each of three
 * projections what its weights and what a row take on the processor, and the same on the device; a copy; a read. */
#define MOERT_PLACING_KIND 14
enum { MOERT_CHEAPEST, MOERT_ALL_COPIED, MOERT_ONLY_HELD };
typedef struct {
    const double *kinds; /* [kinds, MOERT_PLACING_KIND] */
    double host_call_s, launch_s, row_s, pass_s, reluctance;
    double device_s, copy_s, read_s; /* for which these are busy already */
    int32_t tried, rule, by_caller;
} moert_placing;

/* Who computes each of n experts: 0 the processor, 1 the device that holds it, 2 the device after a copy. `given` [3, n]:
 * tokens, kind, and 1 where it lies in memory plus 2 where it is on the device. `scratch` has six numbers for each. How long
 * all of it takes. */
double moert_assign(const moert_placing *with, int n, const int32_t *given, uint8_t *who, double *scratch);

/* Codes for some inputs of a matrix that lies turned, [inputs, columns]: one input after the other, all columns side by side.
 * What one has moved by is taken from the values of those after it, factor[j][k] times. Codes are whole numbers from 0 to
 * `top`. They are made from values that are weights (GPTQ, Frantar et al. 2022):
 *   code = round((value - minimum) / scale), moved = (minimum + code scale - value) / -factor[j][j];
 * or improved, from values that are half the gradient by which they move (coordinate descent, Behdin et al. 2023):
 *   code = round(value / scale / factor[j][j] + code), moved = its change times scale.
 * A scale that is not above 0 divides as 1 does. */
typedef struct {
    const float *values, *factor;  /* [inputs, columns], rows `stride` apart; [inputs, inputs], rows `across` apart */
    const float *scale, *minimum;  /* [groups, columns] */
    const int32_t *group;          /* [inputs] */
    float *codes, *moved;          /* as values */
    int64_t stride, across;
    int32_t inputs, columns, improves;
    float top;
} moert_feedback;
void moert_code_inputs(int isa, const moert_feedback *block);

/* Trellis codes for pairs of inputs of a matrix that lies turned, [inputs, columns], as moert_code_inputs makes codes: a pair
 * of inputs after the other, all columns by one path of states, each of which follows on `step` bits from the one before. The
 * path begins after `state`, or anywhere if that is negative; the state that it ends in is returned. Of a pair's end, `look`
 * columns of the next pair are taken into account; the inputs and `ahead` more (0 or 2) have values and factors.
 * `coded`, states' values, are made, or improved. What a column costs counts `weight` times. */
typedef struct {
    const float *values, *factor;  /* [inputs + ahead, columns], rows `stride` apart; [both, both], rows `across` apart */
    const float *scale, *weight;   /* [columns] */
    const float *first, *second;   /* [4096]: the values that a state stands for */
    float *coded, *moved;          /* as values; [inputs + ahead, columns] if they are improved */
    uint16_t *states;              /* [inputs / 2, columns], rows `stride` apart */
    void *room;                    /* bytes: 8 (columns + look) + (8 + columns + look) (4096 >> step) */
    int64_t stride, across;
    int32_t inputs, ahead, columns, look, step, state, improves;
} moert_trellis;
int moert_code_pairs(int isa, const moert_trellis *block);

/* A read of consecutive bytes of a file, and what came of it. */
typedef struct {
    int64_t offset, nbytes;   /* in the file */
    void *place;              /* where they go */
    int32_t fd;
    uint32_t crc;             /* their CRC-32, if it is to be checked */
    int32_t checked, forget;  /* forget: what was read through the page cache does not stay there */
    int64_t found;            /* of the bytes; fewer than asked for where the file ends or an error comes */
    int32_t error, wrong;     /* what errno said, or 0; whether all were found and have another CRC-32 */
} moert_read;

/* By io_uring if `by_ring` and the system lets us, else by so many threads, the caller among them. NULL: no memory. One
 * thread at a time uses a reader. */
typedef struct moert_reader moert_reader;
moert_reader *moert_reader_open(int threads, int by_ring);
void moert_reader_close(moert_reader *reader);
int moert_reader_has_ring(const moert_reader *reader);

/* All of them; how many are not whole and right. Returns when none is on its way any more. Those that follow each other,
 * here and in a file, are asked for together. Direct reads want places, and offsets and lengths, that the drive takes:
 * others are read through the page cache, and the descriptor is made to do so from then on. */
int moert_read_many(moert_reader *reader, moert_read *reads, int count);

#pragma GCC visibility pop

#endif
