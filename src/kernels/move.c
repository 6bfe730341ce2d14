/* Copies between strided and packed memory, and between many blocks and one buffer. */
#include "formats.h"
#include "kernels.h"

/* Measured on transposed matrices of all sizes and itemsizes: 16 columns at a time are as fast
   as tiles and buffers, and much faster where rows are a power of two apart, because the 16
   cache lines stay in a set of the first-level cache until all rows have used them. */
enum { BAND = 16, LONG_BAND = 4096, FEW = 8 };

/* Runs of CACHE_LINE bytes, and longer ones in memory too large for the cache, are asked for AHEAD
   bytes early: what the processor fetches by itself ends where a run does. */
enum { CACHE_LINE = 64, AHEAD = 1024, FAR = 1 << 20 };

/* Short copies by a few moves that overlap; a call of memcpy costs more than the copy. */
ALWAYS_INLINE void copy(char *to, const char *from, size_t n)
{
    if (__builtin_constant_p(n) || n > 64) {
        memcpy(to, from, n);
    } else if (n >= 16) {
        const size_t last = n - 16;
        char a[16], b[16], c[16], d[16];
        const size_t second = n > 32 ? 16 : 0, third = n > 32 ? last - 16 : last;
        memcpy(a, from, 16);
        memcpy(b, from + second, 16);
        memcpy(c, from + third, 16);
        memcpy(d, from + last, 16);
        memcpy(to, a, 16);
        memcpy(to + second, b, 16);
        memcpy(to + third, c, 16);
        memcpy(to + last, d, 16);
    } else if (n >= 8) {
        uint64_t a, b;
        memcpy(&a, from, 8);
        memcpy(&b, from + n - 8, 8);
        memcpy(to, &a, 8);
        memcpy(to + n - 8, &b, 8);
    } else if (n >= 4) {
        uint32_t a, b;
        memcpy(&a, from, 4);
        memcpy(&b, from + n - 4, 4);
        memcpy(to, &a, 4);
        memcpy(to + n - 4, &b, 4);
    } else if (n != 0) {
        const char a = from[0], b = from[n / 2], c = from[n - 1];
        to[0] = a;
        to[n / 2] = b;
        to[n - 1] = c;
    }
}

ALWAYS_INLINE size_t magnitude(ptrdiff_t stride)
{
    return stride < 0 ? -(size_t)stride : (size_t)stride;
}

ALWAYS_INLINE void expect(int pack, const char *packed, const char *array, size_t run)
{
    for (size_t at = 0; at < run; at += CACHE_LINE) {
        __builtin_prefetch(packed + at, pack);
        __builtin_prefetch(array + at, !pack);
    }
    __builtin_prefetch(array + run - 1, !pack);     /* a run may begin anywhere in a line */
}

/* One line of runs, in either direction. With `pack` and `run` known to the compiler, each use
   becomes a loop of its own. */
ALWAYS_INLINE void move_line(int pack, char *packed, char *array, size_t n, size_t run,
                             size_t packed_step, ptrdiff_t array_step)
{
    const int worth_it = run == CACHE_LINE || (run > CACHE_LINE && n * run >= FAR);
    const size_t early = worth_it ? (AHEAD + run - 1) / run : n;
    for (size_t i = 0; i < n; i++) {
        if (run >= CACHE_LINE && early < n - i)
            expect(pack, packed + early * packed_step, array + (ptrdiff_t)early * array_step, run);
        if (pack)
            copy(packed, array, run);
        else
            copy(array, packed, run);
        packed += packed_step;
        array += array_step;
    }
}

/* Row after row; where the array runs down rather than across, in bands of columns. */
ALWAYS_INLINE void move_bands(int pack, char *packed, char *array, size_t rows, size_t cols,
                              size_t run, size_t packed_row, ptrdiff_t array_row,
                              ptrdiff_t array_col)
{
    const int down = magnitude(array_row) < magnitude(array_col);
    const size_t band = !down || rows == 1 ? cols : rows < FEW ? LONG_BAND : BAND;
    for (size_t left = 0; left < cols; left += band)
        for (size_t row = 0; row < rows; row++)
            move_line(pack, packed + row * packed_row + left * run,
                      array + (ptrdiff_t)row * array_row + (ptrdiff_t)left * array_col,
                      cols - left < band ? cols - left : band, run, run, array_col);
}

/* Column after column, in bands of rows whose packed memory stays in the cache. */
ALWAYS_INLINE void move_columns(int pack, char *packed, char *array, size_t rows, size_t cols,
                                size_t run, size_t packed_row, ptrdiff_t array_row,
                                ptrdiff_t array_col)
{
    for (size_t top = 0; top < rows; top += LONG_BAND)
        for (size_t col = 0; col < cols; col++)
            move_line(pack, packed + top * packed_row + col * run,
                      array + (ptrdiff_t)top * array_row + (ptrdiff_t)col * array_col,
                      rows - top < LONG_BAND ? rows - top : LONG_BAND, run, packed_row, array_row);
}

ALWAYS_INLINE void move_rows(int pack, char *packed, char *array, size_t rows, size_t cols,
                             size_t run, size_t packed_row, ptrdiff_t array_row,
                             ptrdiff_t array_col)
{
    if (cols < FEW && rows > cols)
        move_columns(pack, packed, array, rows, cols, run, packed_row, array_row, array_col);
    else
        move_bands(pack, packed, array, rows, cols, run, packed_row, array_row, array_col);
}

ALWAYS_INLINE void move_any(int pack, char *packed, char *array, size_t rows, size_t cols,
                            size_t run, size_t packed_row, ptrdiff_t array_row,
                            ptrdiff_t array_col)
{
#define RUN(bytes)                                                                            \
    case bytes:                                                                               \
        move_rows(pack, packed, array, rows, cols, bytes, packed_row, array_row, array_col);  \
        break;
    switch (run) {
        RUN(1)
        RUN(2)
        RUN(4)
        RUN(8)
        RUN(12)
        RUN(16)
        RUN(32)
        RUN(64)
    default:
        move_rows(pack, packed, array, rows, cols, run, packed_row, array_row, array_col);
    }
#undef RUN
}

void cydist_pack_rows(char *packed, const char *array, size_t rows, size_t cols,
                      size_t run_bytes, size_t packed_row, ptrdiff_t array_row,
                      ptrdiff_t array_col)
{
    move_any(1, packed, (char *)array, rows, cols, run_bytes, packed_row, array_row, array_col);
}

void cydist_unpack_rows(char *array, const char *packed, size_t rows, size_t cols,
                        size_t run_bytes, size_t packed_row, ptrdiff_t array_row,
                        ptrdiff_t array_col)
{
    move_any(0, (char *)packed, array, rows, cols, run_bytes, packed_row, array_row, array_col);
}

void cydist_flatten(char *out, const char *const *blocks, const size_t *nbytes, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        copy(out, blocks[i], nbytes[i]);
        out += nbytes[i];
    }
}

void cydist_unflatten(char *const *blocks, const char *flat, const size_t *nbytes, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        copy(blocks[i], flat, nbytes[i]);
        flat += nbytes[i];
    }
}
