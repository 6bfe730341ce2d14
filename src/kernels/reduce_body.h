/* The loops of every reduction, once. Each reduce_<isa>.c includes this under its own target
   and defines KERNELS, the name of the table at the end; one with F16C or better also defines
   F16_LANES with its conversions.

   Loops are plain C for the compiler to vectorise. Integers are added and multiplied unsigned,
   so that they wrap; unsigned loops serve both signs. reduce_narrow.h has the 8- and 16-bit
   floats. */

#include "narrow_floats.h"
#include "kernels.h"

#define COMBINE_ARGUMENTS \
    const cydist_reduction *r, void *acc, const void *low, const void *high, size_t count
#define ALL_ARGUMENTS \
    const cydist_reduction *r, void *out, const void *const *sources, int n, size_t count

/* How many elements are before the first cache line that begins with one; 0 if there are too
   few for it to matter. Stores across two lines are slow. */
ALWAYS_INLINE size_t before_line(const void *to, size_t itemsize, size_t count)
{
    return count * itemsize < 1024 ? 0 : (-(uintptr_t)to & 63) / itemsize;
}

/* Two sources of type T; `result` is an expression in a and b. */
#define COMBINE(name, T, result)                                                  \
    static __attribute__((noinline)) void name##_from(T *to, const T *as, const T *bs, \
                                                      size_t count)               \
    {                                                                             \
        EACH(i, count)                                                            \
        {                                                                         \
            const T a = as[i], b = bs[i];                                         \
            to[i] = (T)(result);                                                  \
        }                                                                         \
    }                                                                             \
    static void name(COMBINE_ARGUMENTS)                                           \
    {                                                                             \
        const size_t before = before_line(acc, sizeof(T), count);                 \
        (void)r;                                                                  \
        if (before != 0) name##_from(acc, low, high, before);                     \
        name##_from((T *)acc + before, (const T *)low + before, (const T *)high + before, \
                    count - before);                                              \
    }

/* One array of type T; `result` is an expression in a and k, a constant of type K. */
#define SCALE(name, T, K, constant, result)                        \
    static void name(const cydist_reduction *r, void *out, const void *own, size_t count) \
    {                                                              \
        T *const to = out;                                         \
        const T *const as = own;                                   \
        const K k = constant;                                      \
        EACH(i, count)                                             \
        {                                                          \
            const T a = as[i];                                     \
            to[i] = (T)(result);                                   \
        }                                                          \
    }

#define IN_PLACE(name, scale)                                            \
    static void name(const cydist_reduction *r, void *acc, size_t count) \
    {                                                                    \
        scale(r, acc, acc, count);                                       \
    }

/* ---- any number of sources ---- */

enum { CHUNK_BYTES = 8192 };

/* For types that are their own accumulator: through `combine`, chunk by chunk if there
   is more than one step. */
static void combine_all_exact(ALL_ARGUMENTS)
{
    char chunk[CHUNK_BYTES] __attribute__((aligned(64)));
    const size_t per_chunk =
        n <= 2 && r->finish == NULL ? count : CHUNK_BYTES / r->itemsize;
    for (size_t done = 0; done < count; done += per_chunk) {
        const size_t some = count - done < per_chunk ? count - done : per_chunk;
        const size_t at = done * r->itemsize;
        char *const to = (char *)out + at;
        const void *low = (const char *)sources[0] + at;
        if (n == 1 && to != low) memmove(to, low, some * r->itemsize);
        for (int s = 1; s < n; s++) {
            void *const sum = s == n - 1 ? (void *)to : (void *)chunk;
            r->combine(r, sum, low, (const char *)sources[s] + at, some);
            low = sum;
        }
        if (r->finish) r->finish(r, to, some);
    }
}

/* ---- integers and bool ---- */

ALWAYS_INLINE uint64_t whole(double factor)
{
    return factor < 0 ? (uint64_t)(int64_t)factor : (uint64_t)factor;
}

#define FACTOR(part) (((const double *)r->context)[part])

/* U: unsigned; W: unsigned and at least as wide as int, so that products do not overflow int.
   Q: in which AVG's quotient is exact after truncation. */
#define INTEGER(w, W, Q)                                                      \
    COMBINE(sum_##w, u##w, (W)a + (W)b)                                       \
    COMBINE(product_##w, u##w, (W)a *(W)b)                                    \
    COMBINE(band_##w, u##w, a &b)                                             \
    COMBINE(bor_##w, u##w, a | b)                                             \
    COMBINE(bxor_##w, u##w, a ^ b)                                            \
    COMBINE(min_i##w, i##w, a < b ? a : b)                                    \
    COMBINE(max_i##w, i##w, a > b ? a : b)                                    \
    COMBINE(min_u##w, u##w, a < b ? a : b)                                    \
    COMBINE(max_u##w, u##w, a > b ? a : b)                                    \
    SCALE(multiply_##w, u##w, u##w, (u##w)whole(FACTOR(0)), (W)a *(W)k)       \
    SCALE(quotient_i##w, i##w, Q, (Q)r->ranks, (Q)a / k)                      \
    IN_PLACE(divide_i##w, quotient_i##w)

INTEGER(8, uint32_t, float)
INTEGER(16, uint32_t, float)
INTEGER(32, uint32_t, double)
INTEGER(64, uint64_t, int64_t)

SCALE(quotient_u8, u8, float, (float)r->ranks, (float)a / k)
SCALE(quotient_u16, u16, float, (float)r->ranks, (float)a / k)
SCALE(quotient_u32, u32, double, (double)r->ranks, (double)a / k)
SCALE(quotient_u64, u64, uint64_t, (uint64_t)r->ranks, a / k)
IN_PLACE(divide_u8, quotient_u8)
IN_PLACE(divide_u16, quotient_u16)
IN_PLACE(divide_u32, quotient_u32)
IN_PLACE(divide_u64, quotient_u64)

COMBINE(or_bool, u8, (a | b) != 0)
COMBINE(and_bool, u8, (a != 0) & (b != 0))
COMBINE(xor_bool, u8, (a != 0) ^ (b != 0))

static void combine_all_bool(ALL_ARGUMENTS)
{
    if (n == 1)
        or_bool(r, out, sources[0], sources[0], count);
    else
        combine_all_exact(r, out, sources, n, count);
}

/* ---- the order of floats ---- */

/* As integers the magnitudes of floats are in order; flipping those of negative numbers puts
   all in order, -0 before +0. `last` is the largest magnitude that is not NaN. */
#define KEY(I, w, x, all) (I)((x) ^ (((x) >> (w - 1)) & (all)))
#define IS_NAN(x, all, last) (((x) & (all)) > (last))
#define ORDER(format, w, all, last, nan)                                              \
    static inline i##w format##_less(i##w a, i##w b, int greater)                     \
    {                                                                                 \
        const i##w x = KEY(i##w, w, a, all), y = KEY(i##w, w, b, all);                \
        const i##w key = greater ? (x > y ? x : y) : (x < y ? x : y);                 \
        return (IS_NAN(a, all, last) | IS_NAN(b, all, last)) ? (i##w)(nan)            \
                                                           : KEY(i##w, w, key, all);  \
    }                                                                                 \
    COMBINE(min_##format, i##w, format##_less(a, b, 0))                               \
    COMBINE(max_##format, i##w, format##_less(a, b, 1))

ORDER(f16, 16, 0x7fff, 0x7c00, 0x7e00)
ORDER(bf16, 16, 0x7fff, 0x7f80, 0x7fc0)
ORDER(e4m3, 8, 0x7f, 0x7e, 0x7f)
ORDER(e5m2, 8, 0x7f, 0x7c, 0x7e)
ORDER(f32, 32, 0x7fffffff, 0x7f800000, 0x7fc00000)
ORDER(f64, 64, 0x7fffffffffffffff, 0x7ff0000000000000, 0x7ff8000000000000)

/* ---- float32, float64 and complex ---- */

#define WIDE_FLOAT(w, T)                                                              \
    COMBINE(sum_f##w, f##w, one_nan_f##w(a + b))                                      \
    COMBINE(product_f##w, f##w, one_nan_f##w(a *b))                                   \
    SCALE(multiply_f##w, f##w, T, (T)FACTOR(0), one_nan_f##w(a *k))                   \
    SCALE(quotient_f##w, f##w, T, (T)r->ranks, one_nan_f##w(a / k))                   \
    IN_PLACE(divide_f##w, quotient_f##w)                                              \
    static void sum_c##w(COMBINE_ARGUMENTS) { sum_f##w(r, acc, low, high, 2 * count); } \
    static void divide_c##w(const cydist_reduction *r, void *acc, size_t count)       \
    {                                                                                 \
        divide_f##w(r, acc, 2 * count);                                               \
    }                                                                                 \
    static void product_c##w(COMBINE_ARGUMENTS)                                       \
    {                                                                                 \
        f##w *const to = acc;                                                         \
        const f##w *const as = low, *const bs = high;                                 \
        (void)r;                                                                      \
        EACH(i, count)                                                                \
        {                                                                             \
            const T a = as[2 * i], ai = as[2 * i + 1], b = bs[2 * i], bi = bs[2 * i + 1]; \
            to[2 * i] = one_nan_f##w(a * b + ai * minus_f##w(bi));                                \
            to[2 * i + 1] = one_nan_f##w(a * bi + ai * b);                            \
        }                                                                             \
    }                                                                                 \
    static void multiply_c##w(const cydist_reduction *r, void *out, const void *own,  \
                              size_t count)                                           \
    {                                                                                 \
        f##w *const to = out;                                                         \
        const f##w *const as = own;                                                   \
        const T b = (T)FACTOR(0), bi = (T)FACTOR(1);                                  \
        EACH(i, count)                                                                \
        {                                                                             \
            const T a = as[2 * i], ai = as[2 * i + 1];                                \
            to[2 * i] = one_nan_f##w(a * b + ai * minus_f##w(bi));                                \
            to[2 * i + 1] = one_nan_f##w(a * bi + ai * b);                            \
        }                                                                             \
    }

WIDE_FLOAT(32, float)
WIDE_FLOAT(64, double)

#include "reduce_narrow.h"

/* ---- the table ---- */

#define INTEGER_ROW(sign, w)                                                      \
    {                                                                             \
        [OP_SUM] = sum_##w, [OP_PRODUCT] = product_##w, [OP_MIN] = min_##sign##w, \
        [OP_MAX] = max_##sign##w, [OP_BAND] = band_##w, [OP_BOR] = bor_##w,       \
        [OP_BXOR] = bxor_##w, [OP_AVG] = sum_##w, [OP_PREMUL_SUM] = sum_##w       \
    }
#define FLOAT_ROW(format)                                                         \
    {                                                                             \
        [OP_SUM] = sum_##format, [OP_PRODUCT] = product_##format,                 \
        [OP_MIN] = min_##format, [OP_MAX] = max_##format, [OP_AVG] = sum_##format, \
        [OP_PREMUL_SUM] = sum_##format                                            \
    }
#define COMPLEX_ROW(format)                                                       \
    {                                                                             \
        [OP_SUM] = sum_##format, [OP_PRODUCT] = product_##format,                 \
        [OP_AVG] = sum_##format, [OP_PREMUL_SUM] = sum_##format                   \
    }
#define NARROW_ALL(format)                                                        \
    {                                                                             \
        [OP_SUM] = sum_all_##format, [OP_PRODUCT] = product_all_##format,         \
        [OP_MIN] = combine_all_exact, [OP_MAX] = combine_all_exact,               \
        [OP_AVG] = sum_all_##format, [OP_PREMUL_SUM] = sum_all_##format           \
    }
#define EXACT_ALL { [OP_SUM ... OP_COUNT - 1] = combine_all_exact }

const cydist_kernels KERNELS = {
    .isa = ISA,
    .combine = {
        [DT_BOOL] = {
            [OP_SUM] = or_bool, [OP_PRODUCT] = and_bool, [OP_MIN] = and_bool, [OP_MAX] = or_bool,
            [OP_BAND] = and_bool, [OP_BOR] = or_bool, [OP_BXOR] = xor_bool,
        },
        [DT_I8] = INTEGER_ROW(i, 8), [DT_U8] = INTEGER_ROW(u, 8),
        [DT_I16] = INTEGER_ROW(i, 16), [DT_U16] = INTEGER_ROW(u, 16),
        [DT_I32] = INTEGER_ROW(i, 32), [DT_U32] = INTEGER_ROW(u, 32),
        [DT_I64] = INTEGER_ROW(i, 64), [DT_U64] = INTEGER_ROW(u, 64),
        [DT_F16] = FLOAT_ROW(f16), [DT_BF16] = FLOAT_ROW(bf16),
        [DT_F32] = FLOAT_ROW(f32), [DT_F64] = FLOAT_ROW(f64),
        [DT_C64] = COMPLEX_ROW(c32), [DT_C128] = COMPLEX_ROW(c64),
        [DT_F8E4M3FN] = FLOAT_ROW(e4m3), [DT_F8E5M2] = FLOAT_ROW(e5m2),
    },
    .combine_all = {
        [DT_BOOL] = { [OP_SUM ... OP_COUNT - 1] = combine_all_bool },
        [DT_I8 ... DT_U64] = EXACT_ALL,
        [DT_F16] = NARROW_ALL(f16), [DT_BF16] = NARROW_ALL(bf16),
        [DT_F32 ... DT_C128] = EXACT_ALL,
        [DT_F8E4M3FN] = NARROW_ALL(e4m3), [DT_F8E5M2] = NARROW_ALL(e5m2),
    },
    .prepare = {
        [DT_I8] = multiply_8, [DT_U8] = multiply_8, [DT_I16] = multiply_16,
        [DT_U16] = multiply_16, [DT_I32] = multiply_32, [DT_U32] = multiply_32,
        [DT_I64] = multiply_64, [DT_U64] = multiply_64, [DT_F16] = multiply_f16,
        [DT_BF16] = multiply_bf16, [DT_F32] = multiply_f32, [DT_F64] = multiply_f64,
        [DT_C64] = multiply_c32, [DT_C128] = multiply_c64, [DT_F8E4M3FN] = multiply_e4m3,
        [DT_F8E5M2] = multiply_e5m2,
    },
    .finish = {
        [DT_I8] = divide_i8, [DT_U8] = divide_u8, [DT_I16] = divide_i16, [DT_U16] = divide_u16,
        [DT_I32] = divide_i32, [DT_U32] = divide_u32, [DT_I64] = divide_i64,
        [DT_U64] = divide_u64, [DT_F16] = divide_f16, [DT_BF16] = divide_bf16,
        [DT_F32] = divide_f32, [DT_F64] = divide_f64, [DT_C64] = divide_c32,
        [DT_C128] = divide_c64, [DT_F8E4M3FN] = divide_e4m3, [DT_F8E5M2] = divide_e5m2,
    },
};
