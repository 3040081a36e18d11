/* What the files of this library share: activations as the kernels want them, one table of functions for each
 * instruction set, and the pool. */
#ifndef MOERT_INTERNAL_H
#define MOERT_INTERNAL_H

#include <stddef.h>
#include <stdint.h>

#include "moert.h"

#define ALIGN 64

/* Codes of a row lie in planes: byte k of a plane of width b holds the inputs k * 8/b and following. Vectors of codes
 * taken out of such bytes are not in the order of the inputs, so activations are kept in the same order instead. */
enum { WHOLE, HALVES, QUARTERS, ORDERS, TURNED = ORDERS }; /* one, two or four inputs a byte: 8 bits; 4 bits; 2 and 3 bits */

/* Activations [tokens, cols] rounded to 8 bits, for matrices whose scales cover `group` inputs. */
typedef struct {
    int tokens, cols, group, groups;
    int block;             /* moert_block */
    int padded;            /* cols up to a whole number of vectors of blocks; zeros beyond cols */
    int groups_padded;
    int8_t *bytes[ORDERS]; /* [tokens, padded]; NULL where no matrix wants the order */
    float *blocks;         /* [tokens, padded / block]: the scales */
    float *sums;           /* [tokens, groups_padded]: sum of the rounded activations of each group */
    int ratio;             /* vectors of blocks for each vector of group scales; 0: groups cut through blocks */
    int32_t *index;        /* [ratio, lanes]: which of a vector of group scales each block takes */
    int turned;            /* for trellis codes: turned before they were rounded */
} operand;

/* Trellis codes: where the windows of a vector lie in its bytes, see load_windows. */
typedef struct {
    _Alignas(ALIGN) uint8_t even[64], odd[64];
    int32_t down[16], up[16];
    uint16_t words[32];
    uint8_t from[64], shifts[64];
} window_places;

#define TRELLIS_ROWS 128 /* whose codes lie side by side */
#define TRELLIS_PART 64  /* of them, that are computed together */
#define TRELLIS_TAIL 2   /* bytes behind those of a block: where its last windows end */

#define MOST_BITS 8 /* the highest kind of codes */
#define PANEL 16 /* tokens that lie side by side */
#define STRIP 32 /* rows that are unpacked together */
#define SUMS 16  /* lanes that a sum is made in, whatever the vectors: block b and group g go to lane b and g modulo SUMS */

/* Activations for kernels that compute PANEL tokens at once: transposed in units of 4 bytes, blocks in the order of `place`.
 * Places beyond the last token hold what the last one does. */
typedef struct {
    const operand *x;
    int n;         /* tokens */
    int8_t *bytes; /* [panels][places][block / 4][PANEL][4] */
    float *blocks; /* [panels][places][PANEL] */
    float *sums;   /* [panels][groups][PANEL] */
} panels;

/* Rows of a matrix for the same kernels, a byte for each code; rows beyond `rows` are copies of the last one. */
typedef struct {
    int bits, rows, cols, block;
    uint8_t *codes;         /* [places][STRIP][block] */
    float *scale, *minimum; /* [STRIP][stride], by group */
    int stride;
} strip;

#define ATTEND_ROWS 4
#define DELTA_COLUMNS 128 /* of a head's state that one thread works at */

/* The keys and values of one head, as in moert_keys: how many bytes behind the beginning of a page. */
typedef struct {
    void *const *pages;
    int64_t keys, values, key_steps, value_steps;
    int small;
} head_keys;

typedef struct {
    head_keys kept;
    int dim, value_dim;
    float scale, softcap;
} attend_tile;

/* A query and the keys that it sees, first .. stop - 1. */
typedef struct {
    const float *query; /* [dim] */
    const float *bias;  /* by key, or NULL */
    float *mixed;       /* [value_dim], the result */
    float sink;         /* -infinity: none */
    int first, stop;
} attend_row;

/* One head of a moert_delta, or some of its columns. */
typedef struct {
    const float *keys;         /* [tokens]: what `direct` writes, `stride` from token to token */
    const float *v;            /* [tokens, columns], rows `across` apart */
    const float *decay, *beta; /* [tokens], `heads` apart; decay is NULL if rows decay each in its own way */
    float *state;              /* [dk, columns], rows `dv` apart */
    float *y;                  /* as v */
    int64_t stride, across;
    int tokens, heads, dk, dv, columns;
} delta_part;

/* Heads of a moert_scan that share b and c. */
typedef struct {
    const moert_scan *all;
    int first, heads;
} scan_part;

#define LSTM_UNITS 64 /* of an LSTM that one thread works at */

/* One token of one sequence of a moert_lstm. */
typedef struct {
    const float *inputs; /* [4 * width] */
    const float *h;      /* [width], before it */
    float *c;            /* [width], which changes */
    float *y;            /* [width]: h after it */
} lstm_row;

#define COLUMN_PART 1024 /* numbers of a column that are floats at one time */
#define SUM_TOKENS 4   /* that share what is read of columns */

/* Columns of some of the neurons that fired, as floats. */
typedef struct {
    const int32_t *neurons; /* [count]: which ones */
    const float *columns;   /* [count, stride] */
    int64_t stride;
    int count, first;       /* the first of them is that many behind the first that fired */
} column_set;

/* What a token has for a neuron, which is that many behind the first that fired; INT32_MAX ends a list. */
typedef struct {
    int32_t place;
    float value;
} fired;

typedef struct {
    const char *name;
    int (*runs)(void);
    size_t (*operand_bytes)(int tokens, int cols, int group, int orders);
    /* Lays the operand out in `room` (operand_bytes, aligned) without filling it in. NULL: only its sizes are of use. */
    void (*operand_place)(operand *x, void *room, int tokens, int cols, int group, int orders);
    /* Rounds the activations of one token into its place. */
    void (*operand_fill)(const operand *x, int token, const float *values);
    /* y[t * stride + row - first] for rows first .. stop - 1 and t < n: matrix · token tokens[t] (t where NULL). */
    void (*codes)(const moert_matrix *w, const operand *x, const int32_t *tokens, int n, int first, int stop, float *y,
                  int64_t stride);
    /* From how many tokens on strips and panels are the faster way, by kind of codes; 0: trellis codes. */
    int many[MOST_BITS + 1];
    /* Fills in one panel with the tokens named from its first on (`tokens` NULL: counted through). */
    void (*panel)(const panels *p, int panel, const int32_t *tokens);
    /* Rows row .. row + s->rows - 1 of a matrix. */
    void (*unpack)(const moert_matrix *w, int row, const strip *s);
    /* y[t * stride + r] for all rows of the strip and all tokens of the panels. */
    void (*strips)(const strip *s, const panels *p, float *y, int64_t stride);
    /* As `codes`, for matrices of floats and x [tokens, cols]. */
    void (*floats)(const moert_matrix *w, const float *x, const int32_t *tokens, int n, int first, int stop, float *y,
                   int64_t stride);
    /* y [cols]: one row of a matrix. */
    void (*row)(const moert_matrix *w, int64_t row, float *y);
    /* y = norm(x) * factor */
    void (*norm)(const float *x, const moert_norm *with, float factor, int n, float *y);
    /* up ← act(gate) * up, or act(up) where gate is NULL */
    void (*activate)(const moert_act *act, const float *gate, float *up, int n);
    /* x ← x * sigmoid(gate) */
    void (*gate)(const float *gate, float *x, int n);
    /* Attention of up to ATTEND_ROWS rows that share keys. */
    void (*attend)(const attend_tile *tile, int rows, const attend_row *row);
    /* Writes the key [dim] and the value [value_dim] of position `at` among those of its head. */
    void (*keep)(const float *key, int dim, const float *value, int value_dim, int at, const head_keys *kept);
    /* y [n] += weight * x [n] */
    void (*add)(float weight, const float *x, float *y, int n);
    /* y = log(1 + e^(x + bias)) */
    void (*softplus)(const float *x, const float *bias, int n, float *y);
    /* moert_convolve of channels first .. stop - 1 */
    void (*convolve)(const moert_taps *with, int first, int stop, int tokens, const float *x, float *state, float *y);
    /* keys: k [dk], q [dk], k · q. With decay [dk], k and q are times e^decay there, and k and e^decay [dk] follow. */
    void (*direct)(const float *k, const float *q, const float *decay, int dk, float *keys);
    void (*delta)(const delta_part *part);
    /* `own`: scan_room */
    void (*scan)(const scan_part *part, float *own);
    /* Units first .. stop - 1 of rows of different sequences; at most LSTM_UNITS. */
    void (*lstm)(const float *recurrent, int width, int first, int stop, int rows, const lstm_row *row);
    /* One row. `scores`: room for one of each key that it sees. */
    void (*attend_sparsely)(const moert_sparse *all, int row, float *scores);
    /* y [n] = numbers first .. first + n - 1 of a row of a matrix; `first` is a multiple of WIDE, n at most COLUMN_PART, and
     * y has room up to a multiple of WIDE. Of row `ahead` the same is asked for ahead of its use. */
    void (*column)(const moert_matrix *w, int row, int first, int n, int ahead, float *y);
    /* y[t * stride + i] += the sum of hidden[t * across + neuron] * column[i] over the columns in order, for at most SUM_TOKENS
     * tokens and i < n. */
    void (*sum_all)(const column_set *set, int tokens, const float *hidden, int64_t across, int n, float *y, int64_t stride);
    /* The same for one token and its list, as far as there are columns; gives how far that is. */
    int (*sum_some)(const column_set *set, const fired *list, int n, float *y);
    /* moert_code_inputs */
    void (*feedback)(const moert_feedback *block);
    /* moert_code_pairs */
    int (*viterbi)(const moert_trellis *block);
} operations;

extern const operations *const moert_isas[];
extern const int moert_isas_count;

/* A piece of work: item `item` of a job, run by any thread; `own` is memory of that thread (pool_own). */
typedef void (*work)(const void *job, int item, void *own);

const operations *pool_operations(const moert_pool *pool);
int pool_threads(const moert_pool *pool);

/* Whether it was stopped (moert_pool_stop): items that may take longer than 0.1 s look, and what is left undone is garbage. */
int pool_stopped(const moert_pool *pool);

/* Runs items 0 .. n - 1 on all threads, or on the calling one alone, and returns when all are done. */
void pool_run(moert_pool *pool, work run, const void *job, int n, int alone);

/* `bytes` of aligned memory that stay the caller's until the next call; NULL if there is none. Two of them, as some have
 * to make lists before they know how much they need. */
void *pool_scratch(moert_pool *pool, size_t bytes);
void *pool_lists(moert_pool *pool, size_t bytes);

/* Gives each thread `bytes` of aligned memory of its own, until the next call; 0, or -1 if there is none. */
int pool_own(moert_pool *pool, size_t bytes);

static inline size_t aligned(size_t bytes) { return (bytes + ALIGN - 1) / ALIGN * ALIGN; }
static inline int is_codes(const moert_matrix *w) { return w->kind < MOERT_F16; }
/* Times a power of two, -126 to 127, which is exact. */
static inline void scale_by(int power, float *x, int n) {
    const union { int32_t i; float f; } two = {.i = (power + 127) << 23};
    for (int i = 0; power && i < n; i++) x[i] *= two.f;
}
/* The bits of two inputs in trellis codes; 0: the matrix has none. */
static inline int step_of(const moert_matrix *w) { return w->kind < 0 ? -w->kind : 0; }
/* Rows of the block that begins at row `first`, up to whole bytes for each input. */
static inline int trellis_rows(const moert_matrix *w, int first) {
    const int left = (w->rows - first + 7) / 8 * 8;
    return left < TRELLIS_ROWS ? left : TRELLIS_ROWS;
}
static inline int64_t trellis_block_bytes(const moert_matrix *w, int rows) {
    return (int64_t)((w->cols + 1) / 2) * rows * step_of(w) / 8 + TRELLIS_TAIL;
}
/* Where the codes of the block that begins at row `first` begin, or behind all rows where they end. */
static inline int64_t trellis_start(const moert_matrix *w, int first) {
    const int last = first / TRELLIS_ROWS * TRELLIS_ROWS;
    const int64_t whole = first / TRELLIS_ROWS * trellis_block_bytes(w, TRELLIS_ROWS);
    return last < first ? whole + trellis_block_bytes(w, trellis_rows(w, last)) : whole;
}
/* Inputs that are turned together: the largest power of two that divides their number, at most WIDE. */
static inline int turned_together(int cols) { return cols & -cols & (2 * 64 - 1) ? cols & -cols : 64; }
static inline int order_of(int bits) {
    return bits == 8 || bits < 0 ? WHOLE : bits == 4 || bits == MOERT_MXFP4 ? HALVES : QUARTERS;
}
/* The row becomes one of its block; gives the bytes that the block lies further on. */
static inline int64_t find_block(const moert_matrix *w, int64_t *row) {
    if (!w->blocks) return 0;
    const int64_t block = (uint32_t)*row / (uint32_t)w->block_rows;
    *row -= block * w->block_rows;
    return w->blocks[block];
}
/* Whether an input changes its sign before it is turned. */
static inline int turn_sign(int input) {
    uint32_t mixed = (uint32_t)input * 2654435761u;
    mixed = (mixed ^ mixed >> 15) * 2246822519u;
    return (int)(mixed >> 31);
}
static inline int inputs_a_byte(int order) { return 1 << order; }
static inline int groups_of(int cols, int group) { return (cols + group - 1) / group; }
#define SMALL 16 /* for groups of which no larger block is a part; never in strips */
#define NARROW 32
#define WIDE 64
#define LONG_ROW 512 /* vectors of blocks are padded: short rows would be half padding */

static inline int block_of(int cols, int group) {
    if (group < cols && group % NARROW && group % SMALL == 0) return SMALL;
    return cols > LONG_ROW && (group >= cols || group % WIDE == 0) ? WIDE : NARROW;
}
static inline int blocks_of(int cols, int block) { return (cols + block - 1) / block; }
/* Blocks of one lane lie together, lane after lane in the order in which halves meet when sums are folded: 0 and 8, 4 and
 * 12, 2 and 10, ... */
static inline int lane_at(int i) { return (i & 1) << 3 | (i & 2) << 1 | (i & 4) >> 1 | (i & 8) >> 3; }
static inline int blocks_a_lane(int cols, int block) { return (blocks_of(cols, block) + SUMS - 1) / SUMS; }
static inline int places_of(int cols, int block) { return blocks_a_lane(cols, block) * SUMS; }
static inline int place_of(int block, int each) { return lane_at(block % SUMS) * each + block / SUMS; }
static inline int panels_of(int tokens) { return (tokens + PANEL - 1) / PANEL; }
/* Whether the scales of a matrix cover whole blocks, or all inputs. */
static inline int whole_blocks(int cols, int group) { return group >= cols || group % NARROW == 0; }
/* Scales of a row of a strip, and some more so that rows do not share lines of the cache. */
static inline int strip_stride(int cols, int group) { return (groups_of(cols, group) + 15) / 16 * 16 + 16; }
/* Numbers that a part of a scan keeps of one token: what its heads decay by, and dt x. */
static inline size_t scan_room(const moert_scan *s, int heads) { return (size_t)heads * ((size_t)s->each + (size_t)s->p); }
static inline int64_t row_bytes(int cols, int bits) {
    if (bits == MOERT_MXFP4) return ((int64_t)cols + 1) / 2;
    return bits == 3 ? (cols + 3) / 4 + (cols + 7) / 8 : ((int64_t)cols * bits + 7) / 8;
}

#endif
