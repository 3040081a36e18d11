/* Tiles of 16 rows and 16 tokens: what of strips.inc is done by AMX. */
#undef STRIP_ROWS
#undef STRIP_VECTORS
#undef MANY
#define STRIP_ROWS 16
#define STRIP_VECTORS 2
#define MANY 4
#define TILES

/* Tile 0: sums [row][token]; 1: codes [row][block]; 2: activations [block / 4][token][4]. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes;

INLINE void begin_tiles(const int block) {
    const tile_shapes shapes = {.palette = 1, .row_bytes = {64, block, 64}, .rows = {16, 16, block / 4}};
    _tile_loadconfig(&shapes);
}
INLINE void end_tiles(void) { _tile_release(); }

INLINE void begin_dots(const int block, const uint8_t *codes, const int8_t *inputs) {
    _tile_zero(0);
    _tile_loadd(1, codes, block);
    _tile_loadd(2, inputs, 64);
    _tile_dpbusd(0, 1, 2);
}
INLINE void end_dots(int32_t (*dot)[LANES]) { _tile_stored(0, dot, 64); }
