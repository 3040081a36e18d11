/* Between the files of the checksum. */
#include <stdint.h>

#define CRC32_PIECES 64 /* bytes that a message is folded to */

/* Folds whole pieces of 256 bytes of a message, of which there is at least one, to CRC32_PIECES bytes with the same rest;
 * gives the bytes that it took. For processors with AVX-512 and VPCLMULQDQ. */
int64_t crc32_fold_wide(uint32_t crc, const uint8_t *at, int64_t n, uint8_t *left);
