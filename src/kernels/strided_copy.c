/* Copies between strided and packed memory, and between many blocks and one buffer. */
#include "copy.h"
#include "narrow_floats.h"
#include "kernels.h"
#include "machine.h"
#include "nontemporal.h"

/* Measured on transposed matrices of all sizes and itemsizes: 16 columns at a time are as fast
   as tiles and buffers, and much faster where rows are a power of two apart, because the 16
   cache lines stay in a set of the first-level cache until all rows have used them. */
enum { BAND = 16, LONG_BAND = 4096, FEW = 8 };

/* Runs of CYDIST_LINE bytes, and longer ones in memory too large for the cache, are prefetched
   AHEAD bytes early: the processor's own prefetching ends with a run. */
enum { AHEAD = 1024, FAR = 1 << 20 };

/* From PAST bytes on, writes bypass the caches, if runs are whole cache lines or of
   MOSTLY_LINES bytes. Reads are then prefetched PAST_AHEAD bytes early. */
enum { PAST = 4 << 20, MOSTLY_LINES = 256, PIECE = 256, PAST_AHEAD = 4096 };

/* Short copies with a few overlapping moves; a call of memcpy costs more than the copy. */
ALWAYS_INLINE void copy(char *to, const char *from, size_t n)
{
    if (__builtin_constant_p(n)) {
        memcpy(to, from, n);
    } else if (n > 64) {
        cydist_copy(to, from, n);
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
    for (size_t at = 0; at < run; at += CYDIST_LINE) {
        __builtin_prefetch(packed + at, pack);
        __builtin_prefetch(array + at, !pack);
    }
    __builtin_prefetch(array + run - 1, !pack);     /* a run may begin anywhere in a line */
}

ALWAYS_INLINE void move_run(int pack, char *packed, char *array, size_t run)
{
    if (pack)
        copy(packed, array, run);
    else
        copy(array, packed, run);
}

/* Return whether this processor reads every other line more slowly than all lines. AMD's do. */
static int reads_gaps(void)
{
#ifdef CYDIST_X86
    __builtin_cpu_init();
    return __builtin_cpu_is("amd");
#else
    return 0;
#endif
}

/* Pack a row of runs, past the caches. Lines are prefetched a few at a time, not a run at once. If
   reads_gaps, in the order of their addresses, with those of a gap no longer than a run. */
static void pack_past(char *packed, const char *array, size_t cols, size_t run,
                      ptrdiff_t array_col)
{
    const int gaps = array_col > 0 && (size_t)array_col <= 2 * run && reads_gaps();
    const size_t early = (PAST_AHEAD + run - 1) / run;
    for (size_t i = 0; i < cols; i++) {
        const char *const next = array + (gaps ? PAST_AHEAD : (ptrdiff_t)early * array_col);
        size_t asked = early < cols - i ? 0 : 2 * run;
        for (size_t at = 0; at < run; at += PIECE) {
            const size_t some = run - at < PIECE ? run - at : PIECE;
            const size_t until = gaps ? 2 * (at + some) : at + some;
            for (; asked < until; asked += CYDIST_LINE) __builtin_prefetch(next + asked);
            cydist_stream_lines(packed + at, array + at, some);
        }
        packed += run;
        array += array_col;
    }
}

static void unpack_past(char *array, const char *packed, size_t cols, size_t run,
                        ptrdiff_t array_col)
{
    for (size_t i = 0; i < cols; i++) {
        cydist_stream_lines(array, packed, run);
        packed += run;
        array += array_col;
    }
}

/* Return whether there is enough to write, mostly in whole lines, and the array runs across. */
static int goes_past(int pack, const char *packed, const char *array, size_t rows, size_t cols,
                     size_t run, size_t packed_row, ptrdiff_t array_row, ptrdiff_t array_col)
{
    const size_t begins = pack ? (uintptr_t)packed | packed_row
                               : (uintptr_t)array | (size_t)array_row | (size_t)array_col;
    return rows * cols * run >= PAST &&
           (run >= MOSTLY_LINES || (run >= CYDIST_LINE && (run | begins) % CYDIST_LINE == 0)) &&
           magnitude(array_row) >= magnitude(array_col) * (rows > 1);
}

static void move_past(int pack, char *packed, char *array, size_t rows, size_t cols, size_t run,
                      size_t packed_row, ptrdiff_t array_row, ptrdiff_t array_col)
{
    for (size_t row = 0; row < rows; row++) {
        if (pack)
            pack_past(packed, array, cols, run, array_col);
        else
            unpack_past(array, packed, cols, run, array_col);
        packed += packed_row;
        array += array_row;
    }
    cydist_stream_end();
}

/* One line of runs, in either direction. With `pack` and `run` known to the compiler, each use
   becomes a loop of its own. */
ALWAYS_INLINE void move_line(int pack, char *packed, char *array, size_t n, size_t run,
                             size_t packed_step, ptrdiff_t array_step)
{
    const int worth_it = run == CYDIST_LINE || (run > CYDIST_LINE && n * run >= FAR);
    const size_t early = worth_it ? (AHEAD + run - 1) / run : n;
    size_t i = 0;
    /* Four at a time, as the loop takes as long as one of them. */
    if (__builtin_constant_p(run) && run <= 16)
        for (; n - i >= 4; i += 4) {
            move_run(pack, packed, array, run);
            move_run(pack, packed + packed_step, array + array_step, run);
            move_run(pack, packed + 2 * packed_step, array + 2 * array_step, run);
            move_run(pack, packed + 3 * packed_step, array + 3 * array_step, run);
            packed += 4 * packed_step;
            array += 4 * array_step;
        }
    for (; i < n; i++) {
        if (run >= CYDIST_LINE && early < n - i)
            expect(pack, packed + early * packed_step, array + (ptrdiff_t)early * array_step, run);
        move_run(pack, packed, array, run);
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
    if (goes_past(pack, packed, array, rows, cols, run, packed_row, array_row, array_col)) {
        move_past(pack, packed, array, rows, cols, run, packed_row, array_row, array_col);
        return;
    }
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
