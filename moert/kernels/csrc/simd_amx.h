/* Tiles of 16 rows and 16 tokens: what of strips.inc is done by AMX. */
#include "internal.h"

#undef STRIP_ROWS
#undef STRIP_VECTORS
#undef MANY
#define STRIP_ROWS 8
#define STRIP_VECTORS 2
#define PART_BLOCKS 4
#define TILE_ROWS 16
#define MANY(bits) ((bits) == 0 ? 12 : 4)
#define TILES

/* Tiles 0, 1: sums [row][token] of two vectors of tokens; 2: codes [row][block]; 3, 4: activations [block / 4][token][4]. Tiles
 * of their own for the second half of the rows were measured to be slower. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes;

INLINE void begin_tiles(const int block) {
    const tile_shapes shapes = {
        .palette = 1, .row_bytes = {64, 64, block, 64, 64}, .rows = {16, 16, 16, block / 4, block / 4}};
    _tile_loadconfig(&shapes);
}
INLINE void end_tiles(void) { _tile_release(); }

/* dot[row][token]: one block of a strip times one or two vectors of tokens. */
INLINE void tile_dots(const int block, const int vectors, const uint8_t *codes, const int8_t *const *inputs,
                      int32_t (*dot)[STRIP_VECTORS * LANES]) {
    _tile_loadd(3, inputs[0], 64);
    if (vectors == 2) _tile_loadd(4, inputs[1], 64);
    for (int first = 0; first < STRIP; first += TILE_ROWS) {
        _tile_loadd(2, codes + first * block, block);
        _tile_zero(0);
        _tile_dpbusd(0, 2, 3);
        if (vectors == 2) {
            _tile_zero(1);
            _tile_dpbusd(1, 2, 4);
            _tile_stored(1, dot[first] + LANES, sizeof *dot);
        }
        _tile_stored(0, dot[first], sizeof *dot);
    }
}
