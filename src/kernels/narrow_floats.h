/* Floats narrower than 32 bits, as bits.

   Written without branches, so that a loop over any of these becomes vector code, and without
   float32 subnormals, so that flush-to-zero modes that a process may have set change nothing.
   Rounding is to nearest, ties to even. A result that is NaN is always the format's one quiet
   positive NaN, so that the bits do not depend on the machine's choice among operands. */
#ifndef CYDIST_FORMATS_H
#define CYDIST_FORMATS_H

#include <float.h>
#include <stdint.h>
#include <string.h>

#if defined(__FAST_MATH__) || FLT_EVAL_METHOD == 2
#error "kernels need IEEE arithmetic: build without -ffast-math, and with SSE2 rather than x87"
#endif

#ifdef __GNUC__
#define ALWAYS_INLINE static inline __attribute__((always_inline))
/* Elements at any address, seen through any type. */
#define ANYWHERE __attribute__((aligned(1), may_alias))
#else
#error "kernels need a compiler with GNU attributes, such as gcc or clang"
#endif

/* Iterations are independent: the output is one of the inputs, or does not overlap them. */
#ifdef __clang__
#define EACH(i, n) \
    _Pragma("clang loop vectorize(assume_safety)") for (size_t i = 0; i < (n); i++)
#else
#define EACH(i, n) _Pragma("GCC ivdep") for (size_t i = 0; i < (n); i++)
#endif

typedef int8_t ANYWHERE i8;
typedef uint8_t ANYWHERE u8;
typedef int16_t ANYWHERE i16;
typedef uint16_t ANYWHERE u16;
typedef int32_t ANYWHERE i32;
typedef uint32_t ANYWHERE u32;
typedef int64_t ANYWHERE i64;
typedef uint64_t ANYWHERE u64;
typedef float ANYWHERE f32;
typedef double ANYWHERE f64;

ALWAYS_INLINE uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

ALWAYS_INLINE float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The one NaN of float32 and float64. */
ALWAYS_INLINE float one_nan_f32(float x) { return x == x ? x : __builtin_nanf(""); }
ALWAYS_INLINE double one_nan_f64(double x) { return x == x ? x : __builtin_nan(""); }

/* -x by its bits. The real part of a complex product is written as a sum with this: gcc 12 turns
   a difference next to a sum into a fused vfmaddsub, even with -ffp-contract=off. */
ALWAYS_INLINE float minus_f32(float x) { return float_of(bits_of(x) ^ 0x80000000u); }
ALWAYS_INLINE double minus_f64(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits ^= 1ull << 63;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* a < b ? x : y without a branch; a and b below 2^31, where comparing signed is cheaper. */
ALWAYS_INLINE uint32_t if_less(uint32_t a, uint32_t b, uint32_t x, uint32_t y)
{
    const uint32_t yes = -(uint32_t)((int32_t)a < (int32_t)b);
    return (x & yes) | (y & ~yes);
}

/* An IEEE-like format: `m` bits of mantissa, exponent bias `bias`, the sign at bit `sign`;
   magnitudes from `special` on are infinity or NaN. */
ALWAYS_INLINE float widen(uint32_t x, int m, int bias, int sign, uint32_t special)
{
    const uint32_t magnitude = x & ((1u << sign) - 1);
    const uint32_t shifted = magnitude << (23 - m);
    const uint32_t least = (uint32_t)(128 - bias) << 23; /* the smallest normal number */
    /* A subnormal is its mantissa as the fraction of `least`, less `least`: exact. */
    const uint32_t subnormal = bits_of(float_of(shifted + least) - float_of(least));
    const uint32_t normal = shifted + ((uint32_t)(127 - bias) << 23);
    const uint32_t finite = if_less(magnitude, 1u << m, subnormal, normal);
    const uint32_t bits = if_less(magnitude, special, finite, shifted | 0x7f800000u);
    return float_of(bits | (x >> sign) << 31);
}

/* `top` is where magnitudes that overflow go, `last` the largest that is not NaN. */
ALWAYS_INLINE uint32_t narrow(float x, int m, int bias, int sign, uint32_t top, uint32_t last,
                              uint32_t nan)
{
    const uint32_t bits = bits_of(x);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t least = (uint32_t)(128 - bias) << 23;
    /* Adding a number whose last place is the smallest subnormal makes the FPU round there. */
    const uint32_t grid = (uint32_t)(151 - bias - m) << 23;
    const uint32_t subnormal = bits_of(float_of(magnitude) + float_of(grid)) - grid;
    const uint32_t odd = (magnitude >> (23 - m)) & 1u;
    const uint32_t half = (1u << (22 - m)) - 1u;
    const uint32_t normal =
        (magnitude + half + odd - ((uint32_t)(127 - bias) << 23)) >> (23 - m);
    const uint32_t unbounded = if_less(magnitude, least, subnormal, normal);
    const uint32_t bounded = if_less(unbounded, top, unbounded, top);
    const uint32_t number = if_less(last, bounded, nan, bounded | (bits >> 31) << sign);
    return if_less(0x7f800000u, magnitude, nan, number);
}

ALWAYS_INLINE float f16_widen(uint32_t x) { return widen(x, 10, 15, 15, 0x7c00); }
ALWAYS_INLINE float e5m2_widen(uint32_t x) { return widen(x, 2, 15, 7, 0x7c); }
ALWAYS_INLINE float e4m3_widen(uint32_t x) { return widen(x, 3, 7, 7, 0x7f); }
ALWAYS_INLINE float bf16_widen(uint32_t x) { return float_of(x << 16); }

ALWAYS_INLINE uint32_t f16_narrow(float x)
{
    return narrow(x, 10, 15, 15, 0x7c00, 0x7c00, 0x7e00);
}

ALWAYS_INLINE uint32_t e5m2_narrow(float x)
{
    return narrow(x, 2, 15, 7, 0x7c, 0x7c, 0x7e);
}

/* No infinity: larger values become NaN. */
ALWAYS_INLINE uint32_t e4m3_narrow(float x)
{
    return narrow(x, 3, 7, 7, 0x7f, 0x7e, 0x7f);
}

/* The result is in the upper 16 bits; the lower ones are undefined. */
ALWAYS_INLINE uint32_t bf16_rounded(float x)
{
    const uint32_t bits = bits_of(x);
    return x == x ? bits + 0x7fffu + ((bits >> 16) & 1u) : 0x7fc00000u;
}

ALWAYS_INLINE uint32_t bf16_narrow(float x) { return bf16_rounded(x) >> 16; }

#endif
