/* Reductions of the stand-in, in rank order with one rounding; numbered as nccl.h numbers them. */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { I8, U8, I32, U32, I64, U64, F16, F32, F64, BF16, F8E4M3, F8E5M2, TYPES };
enum { SUM, PROD, MAX, MIN, AVG, PREMUL };

static const size_t TYPE_BYTES[TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

/* Is a contribution multiplied before it is reduced? AVG of floats is a sum of those times 1/ranks. */
static int multiplies(int type, int op) { return op >= PREMUL || (op == AVG && type >= F16); }

/* Floats of 8 and 16 bits: exponent and mantissa bits, bias, and have they infinities? */
typedef struct { int exponent, mantissa, bias, infinities; } Small;

static Small small(int type) {
    switch (type) {
    case F16: return (Small){5, 10, 15, 1};
    case BF16: return (Small){8, 7, 127, 1};
    case F8E4M3: return (Small){4, 3, 7, 0};
    default: return (Small){5, 2, 15, 1};
    }
}

static float decode(unsigned bits, Small s) {
    int sign = bits >> (s.exponent + s.mantissa) & 1;
    int exponent = (int)(bits >> s.mantissa & ((1u << s.exponent) - 1));
    int mantissa = (int)(bits & ((1u << s.mantissa) - 1));
    int most = (1 << s.exponent) - 1;
    double value;
    if (exponent == most && s.infinities) value = mantissa ? NAN : INFINITY;
    else if (exponent == most && mantissa == (1 << s.mantissa) - 1) value = NAN;
    else if (exponent == 0) value = ldexp(mantissa, 1 - s.bias - s.mantissa);
    else value = ldexp(mantissa + (1 << s.mantissa), exponent - s.bias - s.mantissa);
    return (float)(sign ? -value : value);
}

static unsigned encode(float number, Small s) {
    unsigned sign = (unsigned)(signbit(number) != 0) << (s.exponent + s.mantissa);
    int most = (1 << s.exponent) - 1;
    unsigned largest = s.infinities ? (unsigned)most << s.mantissa : (unsigned)((most + 1) << s.mantissa) - 1;
    if (isnan(number)) return sign | (s.infinities ? largest + 1 : largest);
    double value = fabs((double)number);
    if (value == 0) return sign;
    if (isinf(value)) return sign | largest;
    int exponent = ilogb(value);
    if (exponent < 1 - s.bias) exponent = 1 - s.bias;
    /* In units of the last place; nearbyint rounds ties to even. */
    double units = nearbyint(ldexp(value, s.mantissa - exponent));
    double bits = units + ldexp(exponent + s.bias - 1, s.mantissa);
    return sign | (bits >= largest ? largest : (unsigned)bits);
}

static float get_small(const char *at, int type) {
    uint16_t bits = 0;
    memcpy(&bits, at, TYPE_BYTES[type]);
    return decode(bits, small(type));
}

static void put_small(char *at, float value, int type) {
    uint16_t bits = (uint16_t)encode(value, small(type));
    memcpy(at, &bits, TYPE_BYTES[type]);
}

#define COMBINE(a, b) \
    (op == PROD ? (a) * (b) : op == MAX ? ((a) > (b) ? (a) : (b)) : op == MIN ? ((a) < (b) ? (a) : (b)) : (a) + (b))

/* SUM and PROD of integers wrap: in the unsigned type of at least 32 bits. */
#define REDUCE_INTS(T, U)                                                   \
    for (size_t i = 0; i < count; i++) {                                    \
        T total = ((const T *)all[0])[i];                                   \
        for (int r = 1; r < ranks; r++) {                                   \
            T next = ((const T *)all[r])[i];                                \
            if (op == MAX || op == MIN) total = COMBINE(total, next);       \
            else total = (T)COMBINE((U)total, (U)next);                     \
        }                                                                   \
        ((T *)into)[i] = op == AVG ? (T)(total / (T)ranks) : total;         \
    }

#define REDUCE_FLOATS(T)                                                    \
    for (size_t i = 0; i < count; i++) {                                    \
        T total = ((const T *)all[0])[i];                                   \
        for (int r = 1; r < ranks; r++) {                                   \
            T next = ((const T *)all[r])[i];                                \
            total = COMBINE(total, next);                                   \
        }                                                                   \
        ((T *)into)[i] = op == AVG ? total / (T)ranks : total;              \
    }

static void standin_reduce(char *into, const char **all, int ranks, size_t count, int type, int op) {
    switch (type) {
    case I8: REDUCE_INTS(int8_t, uint32_t) return;
    case U8: REDUCE_INTS(uint8_t, uint32_t) return;
    case I32: REDUCE_INTS(int32_t, uint32_t) return;
    case U32: REDUCE_INTS(uint32_t, uint32_t) return;
    case I64: REDUCE_INTS(int64_t, uint64_t) return;
    case U64: REDUCE_INTS(uint64_t, uint64_t) return;
    case F32: REDUCE_FLOATS(float) return;
    case F64: REDUCE_FLOATS(double) return;
    }
    for (size_t i = 0, at = 0; i < count; i++, at += TYPE_BYTES[type]) {
        float total = get_small(all[0] + at, type);
        for (int r = 1; r < ranks; r++) {
            float next = get_small(all[r] + at, type);
            total = COMBINE(total, next);
        }
        put_small(into + at, op == AVG ? total / (float)ranks : total, type);
    }
}

#define SCALE(T) for (size_t i = 0; i < count; i++) ((T *)into)[i] = (T)(((const T *)from)[i] * *(const T *)scalar);

static void standin_scale(char *into, const char *from, size_t count, int type, const char *scalar) {
    switch (type) {
    case I8: SCALE(int8_t) return;
    case U8: SCALE(uint8_t) return;
    case I32: SCALE(uint32_t) return;
    case U32: SCALE(uint32_t) return;
    case I64: SCALE(uint64_t) return;
    case U64: SCALE(uint64_t) return;
    case F32: SCALE(float) return;
    case F64: SCALE(double) return;
    }
    for (size_t i = 0, at = 0; i < count; i++, at += TYPE_BYTES[type])
        put_small(into + at, get_small(from + at, type) * get_small(scalar, type), type);
}
