/* Part of reduce_body.h: the floats of 8 and 16 bits, which accumulate in float32. Many sources
   pass through a chunk of float32 that stays in the first-level cache. Each format has
     load, store                     between memory and a chunk, rounding
     sum_start, sum_step, sum_end    chunk = a + b; chunk += a; memory = chunk + a, rounded
     sum_<format>                    memory = a + b, rounded
   and the same for product. */

enum { CHUNK = 1024 }; /* float32 elements: 4 KiB */

/* The body sees `chunk`, and `some` elements starting with number `at`. */
#define CHUNKS(body)                                                              \
    {                                                                             \
        float chunk[CHUNK] __attribute__((aligned(64)));                          \
        for (size_t at = 0; at < count; at += CHUNK) {                            \
            const size_t some = count - at < CHUNK ? count - at : CHUNK;          \
            body;                                                                 \
        }                                                                         \
    }

/* ---- conversions that are long in plain C: faster in short loops than fused ---- */

#define CONVERSIONS(format, T)                                                    \
    static inline void load_##format(float *to, const T *from, size_t n)          \
    {                                                                             \
        EACH(i, n) to[i] = format##_widen(from[i]);                               \
    }                                                                             \
    static inline void store_##format(T *to, const float *from, size_t n)         \
    {                                                                             \
        EACH(i, n) to[i] = (T)format##_narrow(from[i]);                           \
    }

#define LONG_STEPS(format, T, name, op)                                           \
    static inline void name##_step_##format(float *to, const T *a, size_t n)      \
    {                                                                             \
        EACH(i, n) to[i] = to[i] op format##_widen(a[i]);                         \
    }                                                                             \
    static inline void name##_start_##format(float *to, const T *a, const T *b, size_t n) \
    {                                                                             \
        load_##format(to, a, n);                                                  \
        name##_step_##format(to, b, n);                                           \
    }                                                                             \
    static inline void name##_end_##format(T *to, float *chunk, const T *a, size_t n) \
    {                                                                             \
        name##_step_##format(chunk, a, n);                                        \
        store_##format(to, chunk, n);                                             \
    }                                                                             \
    static void name##_##format(COMBINE_ARGUMENTS)                                \
    {                                                                             \
        (void)r;                                                                  \
        CHUNKS(name##_start_##format(chunk, (const T *)low + at, (const T *)high + at, some); \
               store_##format((T *)acc + at, chunk, some))                        \
    }

CONVERSIONS(e4m3, u8)
LONG_STEPS(e4m3, u8, sum, +)
LONG_STEPS(e4m3, u8, product, *)
CONVERSIONS(e5m2, u8)
LONG_STEPS(e5m2, u8, sum, +)
LONG_STEPS(e5m2, u8, product, *)

/* ---- bfloat16, by pairs ---- */

/* A 32-bit word is one number shifted and one masked, which costs no shuffling. A chunk holds
   the first of all pairs, then the second of all pairs, then the odd one. */
#define FIRST(word) float_of((word) << 16)
#define SECOND(word) float_of((word) & 0xffff0000u)
#define PAIR(first, second) ((bf16_rounded(first) >> 16) | (bf16_rounded(second) & 0xffff0000u))

static inline void load_bf16(float *to, const u16 *from, size_t n)
{
    const u32 *const words = (const u32 *)from;
    float *const second = to + n / 2;
    EACH(i, n / 2)
    {
        const uint32_t word = words[i];
        to[i] = FIRST(word);
        second[i] = SECOND(word);
    }
    if (n % 2 != 0) to[n - 1] = bf16_widen(from[n - 1]);
}

static inline void store_bf16(u16 *to, const float *from, size_t n)
{
    u32 *const words = (u32 *)to;
    const float *const second = from + n / 2;
    EACH(i, n / 2) words[i] = PAIR(from[i], second[i]);
    if (n % 2 != 0) to[n - 1] = (uint16_t)bf16_narrow(from[n - 1]);
}

#define PAIR_STEPS(name, op)                                                      \
    static inline void name##_start_bf16(float *to, const u16 *a, const u16 *b, size_t n) \
    {                                                                             \
        const u32 *const as = (const u32 *)a, *const bs = (const u32 *)b;         \
        float *const second = to + n / 2;                                         \
        EACH(i, n / 2)                                                            \
        {                                                                         \
            const uint32_t x = as[i], y = bs[i];                                  \
            to[i] = FIRST(x) op FIRST(y);                                         \
            second[i] = SECOND(x) op SECOND(y);                                   \
        }                                                                         \
        if (n % 2 != 0) to[n - 1] = bf16_widen(a[n - 1]) op bf16_widen(b[n - 1]); \
    }                                                                             \
    static inline void name##_step_bf16(float *to, const u16 *a, size_t n)        \
    {                                                                             \
        const u32 *const as = (const u32 *)a;                                     \
        float *const second = to + n / 2;                                         \
        EACH(i, n / 2)                                                            \
        {                                                                         \
            const uint32_t x = as[i];                                             \
            to[i] = to[i] op FIRST(x);                                            \
            second[i] = second[i] op SECOND(x);                                   \
        }                                                                         \
        if (n % 2 != 0) to[n - 1] = to[n - 1] op bf16_widen(a[n - 1]);            \
    }                                                                             \
    static inline void name##_end_bf16(u16 *to, const float *chunk, const u16 *a, size_t n) \
    {                                                                             \
        const u32 *const as = (const u32 *)a;                                     \
        u32 *const words = (u32 *)to;                                             \
        const float *const second = chunk + n / 2;                                \
        EACH(i, n / 2)                                                            \
        {                                                                         \
            const uint32_t x = as[i];                                             \
            words[i] = PAIR(chunk[i] op FIRST(x), second[i] op SECOND(x));        \
        }                                                                         \
        if (n % 2 != 0)                                                           \
            to[n - 1] = (uint16_t)bf16_narrow(chunk[n - 1] op bf16_widen(a[n - 1])); \
    }

PAIR_STEPS(sum, +)
PAIR_STEPS(product, *)

#ifndef TWO_AT_ONCE
#define PAIR_TWO(name, op)                                                        \
    static void name##_bf16(COMBINE_ARGUMENTS)                                    \
    {                                                                             \
        const size_t n = count;                                                   \
        const u16 *const a = low, *const b = high;                                \
        const u32 *const as = low, *const bs = high;                              \
        u32 *const to = acc;                                                      \
        (void)r;                                                                  \
        EACH(i, n / 2)                                                            \
        {                                                                         \
            const uint32_t x = as[i], y = bs[i];                                  \
            to[i] = PAIR(FIRST(x) op FIRST(y), SECOND(x) op SECOND(y));           \
        }                                                                         \
        if (n % 2 != 0)                                                           \
            ((u16 *)acc)[n - 1] =                                                 \
                (uint16_t)bf16_narrow(bf16_widen(a[n - 1]) op bf16_widen(b[n - 1])); \
    }

PAIR_TWO(sum, +)
PAIR_TWO(product, *)
#endif

/* ---- float16, with the machine's own conversions if it has them ---- */

#ifdef F16_LANES
/* The same bits as f16_widen and f16_narrow. */
#define LANES(whole_vector, rest)                            \
    size_t i = 0;                                            \
    for (; i + F16_LANES <= n; i += F16_LANES) whole_vector; \
    for (; i < n; i++) rest;

static inline void load_f16(float *to, const u16 *from, size_t n)
{
    LANES(F16_PUT(to + i, F16_WIDEN(from + i)), to[i] = f16_widen(from[i]))
}

static inline void store_f16(u16 *to, const float *from, size_t n)
{
    LANES(F16_NARROW(to + i, F16_GET(from + i)), to[i] = (uint16_t)f16_narrow(from[i]))
}

#define LANE_STEPS(name, op)                                                      \
    static inline void name##_start_f16(float *to, const u16 *a, const u16 *b, size_t n) \
    {                                                                             \
        LANES(F16_PUT(to + i, F16_WIDEN(a + i) op F16_WIDEN(b + i)),              \
              to[i] = f16_widen(a[i]) op f16_widen(b[i]))                         \
    }                                                                             \
    static inline void name##_step_f16(float *to, const u16 *a, size_t n)         \
    {                                                                             \
        LANES(F16_PUT(to + i, F16_GET(to + i) op F16_WIDEN(a + i)),               \
              to[i] = to[i] op f16_widen(a[i]))                                   \
    }                                                                             \
    static inline void name##_end_f16(u16 *to, const float *chunk, const u16 *a, size_t n) \
    {                                                                             \
        LANES(F16_NARROW(to + i, F16_GET(chunk + i) op F16_WIDEN(a + i)),         \
              to[i] = (uint16_t)f16_narrow(chunk[i] op f16_widen(a[i])))          \
    }

LANE_STEPS(sum, +)
LANE_STEPS(product, *)

#ifndef TWO_AT_ONCE
#define LANE_TWO(name, op)                                                        \
    static void name##_f16(COMBINE_ARGUMENTS)                                     \
    {                                                                             \
        u16 *const to = acc;                                                      \
        const u16 *const a = low, *const b = high;                                \
        const size_t n = count;                                                   \
        (void)r;                                                                  \
        LANES(F16_NARROW(to + i, F16_WIDEN(a + i) op F16_WIDEN(b + i)),           \
              to[i] = (uint16_t)f16_narrow(f16_widen(a[i]) op f16_widen(b[i])))   \
    }

LANE_TWO(sum, +)
LANE_TWO(product, *)
#endif
#else
CONVERSIONS(f16, u16)
LONG_STEPS(f16, u16, sum, +)
LONG_STEPS(f16, u16, product, *)
#endif

/* ---- two arrays of 16 bits, many elements at a time ---- */

#ifdef TWO_AT_ONCE
/* Prefetch from the second-level cache, which takes longer than the sums, this many elements ahead.
   Code with BF16_CONVERSION reads early enough by itself, and is slower with prefetches. */
#ifdef BF16_CONVERSION
#define EXPECT(p)
#else
enum { AHEAD = 512 };
#define EXPECT(p) (__builtin_prefetch((p) + AHEAD), __builtin_prefetch((p) + AHEAD + 32))
#endif

#define ONE_NAN(format, last, nan)                                                \
    static void one_nan_##format(u16 *to, size_t n)                               \
    {                                                                             \
        EACH(i, n) to[i] = (to[i] & 0x7fffu) > (last) ? (nan) : to[i];            \
    }

/* Fewer elements than TWO_AT_ONCE go through memory of their own. */
#define TWO(format, name)                                                         \
    static void name##_few_##format(u16 *to, const u16 *a, const u16 *b, size_t n, int careful) \
    {                                                                             \
        u16 x[TWO_AT_ONCE] = {0}, y[TWO_AT_ONCE] = {0};                           \
        memcpy(x, a, n * sizeof *x);                                              \
        memcpy(y, b, n * sizeof *y);                                              \
        if (name##_at_once_##format(x, x, y, careful)) one_nan_##format(x, n);             \
        memcpy(to, x, n * sizeof *x);                                             \
    }                                                                             \
    static void name##_##format(COMBINE_ARGUMENTS)                                \
    {                                                                             \
        u16 *const to = acc;                                                      \
        const u16 *const a = low, *const b = high;                                \
        const int careful = CAREFUL;                                              \
        size_t i = before_line(to, sizeof *to, count);                            \
        (void)r;                                                                  \
        if (i != 0) name##_few_##format(to, a, b, i, careful);                    \
        while (count - i >= TWO_AT_ONCE) {                                        \
            const size_t start = i;                                               \
            const size_t end = start + (count - i < CHUNK ? count - i : CHUNK);   \
            int nan = 0;                                                          \
            for (; end - i >= TWO_AT_ONCE; i += TWO_AT_ONCE) {                    \
                EXPECT(a + i);                                                    \
                EXPECT(b + i);                                                    \
                nan |= name##_at_once_##format(to + i, a + i, b + i, careful);    \
            }                                                                     \
            if (nan) one_nan_##format(to + start, i - start);                     \
        }                                                                         \
        if (i != count) name##_few_##format(to + i, a + i, b + i, count - i, careful); \
    }

ONE_NAN(bf16, 0x7f80, 0x7fc0)
ONE_NAN(f16, 0x7c00, 0x7e00)
TWO(bf16, sum)
TWO(bf16, product)
TWO(f16, sum)
TWO(f16, product)
#endif

/* ---- common to all formats ---- */

static inline void divide_chunk(float *chunk, float by, size_t n)
{
    EACH(i, n) chunk[i] /= by;
}

static inline void multiply_chunk(float *chunk, float by, size_t n)
{
    EACH(i, n) chunk[i] *= by;
}

/* With a finish (AVG) the last source is a step like the others, and the division comes before
   the one rounding. */
#define MANY(format, T, name)                                                     \
    static void name##_all_##format(ALL_ARGUMENTS)                                \
    {                                                                             \
        const T *const *const from = (const T *const *)sources;                   \
        if (n == 1 && r->finish == NULL)                                          \
            memmove(out, sources[0], count * sizeof(T));                          \
        else if (n == 2 && r->finish == NULL)                                     \
            name##_##format(r, out, sources[0], sources[1], count);               \
        else                                                                      \
            CHUNKS(                                                               \
                if (n == 1) load_##format(chunk, from[0] + at, some);             \
                else name##_start_##format(chunk, from[0] + at, from[1] + at, some); \
                for (int s = 2; s < n - (r->finish == NULL); s++)                 \
                    name##_step_##format(chunk, from[s] + at, some);              \
                if (r->finish == NULL) {                                          \
                    name##_end_##format((T *)out + at, chunk, from[n - 1] + at, some); \
                } else {                                                          \
                    divide_chunk(chunk, (float)r->ranks, some);                   \
                    store_##format((T *)out + at, chunk, some);                   \
                })                                                                \
    }

#define NARROW_FLOAT(format, T)                                                   \
    MANY(format, T, sum)                                                          \
    MANY(format, T, product)                                                      \
    static void multiply_##format(const cydist_reduction *r, void *out, const void *own, \
                                  size_t count)                                   \
    {                                                                             \
        CHUNKS(load_##format(chunk, (const T *)own + at, some);                   \
               multiply_chunk(chunk, (float)FACTOR(0), some);                     \
               store_##format((T *)out + at, chunk, some))                        \
    }                                                                             \
    static void divide_##format(const cydist_reduction *r, void *acc, size_t count) \
    {                                                                             \
        CHUNKS(load_##format(chunk, (const T *)acc + at, some);                   \
               divide_chunk(chunk, (float)r->ranks, some);                        \
               store_##format((T *)acc + at, chunk, some))                        \
    }

NARROW_FLOAT(f16, u16)
NARROW_FLOAT(bf16, u16)
NARROW_FLOAT(e4m3, u8)
NARROW_FLOAT(e5m2, u8)
