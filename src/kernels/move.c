/* Copies between strided and packed memory, and between many blocks and one buffer. */
#include "formats.h"
#include "kernels.h"

/* A tile of this many runs each way stays in the first-level cache while rows and columns of a
   transposed array cross in it. */
enum { TILE = 32 };

/* Short copies by a few moves that overlap; a call of memcpy costs more than the copy. */
ALWAYS_INLINE void copy(char *to, const char *from, size_t n)
{
    if (n > 64) {
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

/* With `pack` and `run` known to the compiler, each use becomes a loop of its own. */
ALWAYS_INLINE void move_row(int pack, char *packed, char *array, size_t cols, size_t run,
                            ptrdiff_t array_col)
{
    for (size_t col = 0; col < cols; col++) {
        if (pack)
            copy(packed, array, run);
        else
            copy(array, packed, run);
        packed += run;
        array += array_col;
    }
}

ALWAYS_INLINE void move_rows(int pack, char *packed, char *array, size_t rows, size_t cols,
                             size_t run, size_t packed_row, ptrdiff_t array_row,
                             ptrdiff_t array_col)
{
    const size_t down = array_row < 0 ? -(size_t)array_row : (size_t)array_row;
    const size_t across = array_col < 0 ? -(size_t)array_col : (size_t)array_col;
    /* Where the array runs down rather than across, go through it in tiles. */
    const size_t width = down < across ? TILE : cols;
    for (size_t left = 0; left < cols; left += width) {
        const size_t some = cols - left < width ? cols - left : width;
        for (size_t row = 0; row < rows; row++)
            move_row(pack, packed + row * packed_row + left * run,
                     array + (ptrdiff_t)row * array_row + (ptrdiff_t)left * array_col, some, run,
                     array_col);
    }
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
