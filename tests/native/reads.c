/* Many reads in one call, by the ring and by threads: what arrives, what is told, and that checksums are looked at. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "driver.h"

enum { SECTOR = 512, SECTORS = 1200, MOST_READS = 600 };

static uint8_t *content, *places;
static moert_read reads[MOST_READS];
static uint64_t state;

static int below(int n) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (int)((state >> 33) % (unsigned)n);
}

/* Reads of one to four units, half of them behind the one before. */
static void plan(int fd, int count) {
    int64_t next = 0, room = 0;
    for (int i = 0; i < count; i++) {
        int64_t units = 1 + below(4), start = below(2) && next + units <= SECTORS ? next : below(SECTORS - 4);
        reads[i] = (moert_read){.offset = start * SECTOR, .nbytes = units * SECTOR, .place = places + room, .fd = fd};
        reads[i].crc = moert_crc32(0, content + reads[i].offset, reads[i].nbytes);
        reads[i].checked = below(4) > 0;
        reads[i].forget = below(2);
        next = start + units;
        room += reads[i].nbytes;
    }
    memset(places, 0, (size_t)room);
}

static int arrived(int count) {
    for (int i = 0; i < count; i++)
        if (reads[i].found != reads[i].nbytes || reads[i].error || reads[i].wrong ||
            memcmp(reads[i].place, content + reads[i].offset, (size_t)reads[i].nbytes))
            return 0;
    return 1;
}

static void in_one_way(const char *path, moert_reader *reader, int flags) {
    static const int counts[] = {0, 1, 2, 5, 63, 64, 65, 130, 256, 257, 600};
    for (int i = 0; i < (int)(sizeof counts / sizeof *counts); i++) {
        int fd = open(path, O_RDONLY | flags), n = counts[i];
        if (fd < 0) fd = open(path, O_RDONLY);
        describe("%d reads, %s%s", n, flags ? "direct" : "buffered", moert_reader_has_ring(reader) ? ", ring" : "");
        plan(fd, n);
        require(engines, !moert_read_many(reader, reads, n) && arrived(n), "they arrive");
        if (n > 2) {
            reads[1].checked = reads[n - 1].checked = 1;
            reads[1].crc++, reads[n - 1].crc++;
            reads[n / 2].checked = 0, reads[n / 2].fd = -1;
            require(engines, moert_read_many(reader, reads, n) == (n / 2 == 1 ? 2 : 3), "three fail");
            require(engines, reads[n - 1].wrong && !reads[0].wrong && reads[n / 2].error == EBADF, "these three");
        }
        close(fd);
    }
    describe("beyond the end of the file");
    int fd = open(path, O_RDONLY | flags);
    if (fd < 0) fd = open(path, O_RDONLY);
    for (int i = 0; i < 3; i++)
        reads[i] = (moert_read){.offset = (SECTORS - 12 + 8 * i) * SECTOR, .nbytes = 8 * SECTOR, .place = places + 4096 * i, .fd = fd};
    require(engines, moert_read_many(reader, reads, 3) == 2, "two are not whole");
    require(engines, reads[0].found == 8 * SECTOR && reads[1].found == 4 * SECTOR && !reads[2].found && !reads[2].error, "found");
    close(fd);
}

void reads_cases(void) {
    char path[] = "reads-XXXXXX";
    int fd = mkstemp(path);
    content = malloc(SECTORS * SECTOR);
    places = aligned_alloc(4096, MOST_READS * 4 * SECTOR);
    describe("a file to read");
    for (int i = 0; i < SECTORS * SECTOR; i++) content[i] = (uint8_t)below(256);
    require(engines, fd >= 0 && write(fd, content, SECTORS * SECTOR) == SECTORS * SECTOR && !fsync(fd), "written");
    for (int way = 0; way < 4; way++) {
        moert_reader *reader = moert_reader_open(way % 2 ? 3 : 1, way / 2);
        in_one_way(path, reader, 0);
#ifdef O_DIRECT
        in_one_way(path, reader, O_DIRECT);
#endif
        moert_reader_close(reader);
    }
    close(fd);
    unlink(path);
    free(content);
    free(places);
}
