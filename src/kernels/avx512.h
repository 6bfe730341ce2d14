/* The common part of the variants with AVX-512: conversions of float16, and sums and products
   of two arrays of 16-bit floats, many elements at a time. Included under their targets. */

ALWAYS_INLINE __m256i avx512_f16_narrow(__m512 x)
{
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtps_ph(_mm512_mask_mov_ps(x, is_nan, _mm512_set1_ps(__builtin_nanf(""))), 0);
}

#define F16_LANES 16
#define F16_WIDEN(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define F16_NARROW(to, from) \
    _mm256_storeu_si256((__m256i *)(to), avx512_f16_narrow(from))
#define F16_GET(p) _mm512_load_ps(p)
#define F16_PUT(p, x) _mm512_store_ps(p, x)

/* 64 elements at a time, in two halves. A NaN here has the bits that the processor chose; the
   result says whether there is one. The search costs an instruction for 32 elements. So replacing
   NaN by the one NaN costs nothing if there is none. */
#define TWO_AT_ONCE 64
#define ALL_NUMBERS 0xffff
#define NUMBERS_IN(first, second, numbers) \
    _mm512_mask_cmp_ps_mask(numbers, first, second, _CMP_ORD_Q)
#define BOTH_HALVES(name, format)                                                 \
    ALWAYS_INLINE int name##_at_once_##format(u16 *to, const u16 *a, const u16 *b, \
                                              int careful)                        \
    {                                                                             \
        (void)careful;                                                            \
        __mmask16 numbers = name##_half_##format(to, a, b, ALL_NUMBERS);          \
        numbers = name##_half_##format(to + 32, a + 32, b + 32, numbers);         \
        return numbers != ALL_NUMBERS;                                            \
    }

/* The numbers in the lower and the upper halves of 32-bit words. */
#define LOWER(words) _mm512_castsi512_ps(_mm512_slli_epi32(words, 16))
#define UPPER(words) _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(-65536)))

/* The upper half of a in the lower half, the lower half of b in the upper one. */
#ifdef FUNNEL_SHIFT
#define CROSSED(a, b) _mm512_shrdi_epi32(a, b, 16)
#else
#define CROSSED(a, b) _mm512_or_si512(_mm512_srli_epi32(a, 16), _mm512_slli_epi32(b, 16))
#endif
#define A_IF_C_ELSE_B 0xe4

/* Round half-words: up if the rest is more than a half, or a half with an odd number. The last
   place of the rest would matter only in 0x8001. No sum or product of two numbers of 8 places has
   that rest: a sum does not have both of these places, and a factor of 0x8001 is 331. So that place
   can say whether the number is odd. */
ALWAYS_INLINE __m512i avx512_bf16_narrow(__m512 lower, __m512 upper)
{
    const __m512i a = _mm512_castps_si512(lower), b = _mm512_castps_si512(upper);
    const __m512i one = CROSSED(a, b), other = _mm512_mask_mov_epi16(a, 0xaaaaaaaa, b);
    const __m512i kept =
        _mm512_ternarylogic_epi32(one, other, _mm512_set1_epi32(0x0000ffff), A_IF_C_ELSE_B);
    const __m512i weight =
        _mm512_ternarylogic_epi32(one, other, _mm512_set1_epi32((int)0xfffe0001), A_IF_C_ELSE_B);
    const __mmask32 up = _mm512_cmpgt_epu16_mask(weight, _mm512_set1_epi16(-32768));
    return _mm512_mask_sub_epi16(kept, up, kept, _mm512_set1_epi16(-1));
}

#ifdef BF16_CONVERSION
/* The processor's own rounding. It treats subnormal numbers as zero and keeps the bits of NaN. If a
   result is one of them, all 64 are rounded as above. If the process lets arithmetic treat
   subnormal numbers as zero but produce them, the search does not see them. Then all are rounded
   as above. */
#define TAKEN_FOR_ZERO 0x0040
#define MADE_ZERO 0x8000
#define CAREFUL ((_mm_getcsr() & (TAKEN_FOR_ZERO | MADE_ZERO)) == TAKEN_FOR_ZERO)
#define SUBNORMAL_OR_NAN 0xa1
#define SPECIAL(x) _mm512_fpclass_ps_mask(x, SUBNORMAL_OR_NAN)

ALWAYS_INLINE __m512i avx512_bf16_converted(__m512 lower, __m512 upper)
{
    static const u16 turns[32] __attribute__((aligned(64))) = {
        0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i apart = (__m512i)_mm512_cvtne2ps_pbh(upper, lower);
    return _mm512_permutexvar_epi16(_mm512_load_si512(turns), apart);
}

#define BF16_AT_ONCE(name, op)                                                    \
    ALWAYS_INLINE int name##_at_once_bf16(u16 *to, const u16 *a, const u16 *b, int careful) \
    {                                                                             \
        const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);       \
        const __m512i v = _mm512_loadu_si512(a + 32), w = _mm512_loadu_si512(b + 32); \
        const __m512 one = LOWER(x) op LOWER(y), two = UPPER(x) op UPPER(y);      \
        const __m512 three = LOWER(v) op LOWER(w), four = UPPER(v) op UPPER(w);   \
        const int special = SPECIAL(one) | SPECIAL(two) | SPECIAL(three) | SPECIAL(four); \
        if (__builtin_expect(special | careful, 0)) {                             \
            _mm512_storeu_si512(to, avx512_bf16_narrow(one, two));                \
            _mm512_storeu_si512(to + 32, avx512_bf16_narrow(three, four));        \
            return NUMBERS_IN(one, two, NUMBERS_IN(three, four, ALL_NUMBERS)) != ALL_NUMBERS; \
        }                                                                         \
        _mm512_storeu_si512(to, avx512_bf16_converted(one, two));                 \
        _mm512_storeu_si512(to + 32, avx512_bf16_converted(three, four));         \
        return 0;                                                                 \
    }
#else
#define CAREFUL 0
#define BF16_AT_ONCE(name, op)                                                    \
    ALWAYS_INLINE __mmask16 name##_half_bf16(u16 *to, const u16 *a, const u16 *b, \
                                             __mmask16 numbers)                   \
    {                                                                             \
        const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);       \
        const __m512 lower = LOWER(x) op LOWER(y), upper = UPPER(x) op UPPER(y);  \
        _mm512_storeu_si512(to, avx512_bf16_narrow(lower, upper));                \
        return NUMBERS_IN(lower, upper, numbers);                                 \
    }                                                                             \
    BOTH_HALVES(name, bf16)
#endif

BF16_AT_ONCE(sum, +)
BF16_AT_ONCE(product, *)

#ifdef HALF_PRECISION
/* The same bits as in float32, rounded: float32 has 2 * 11 + 2 places, and from that many on
   rounding twice equals rounding once. */
#define F16_AT_ONCE(name, op)                                                     \
    ALWAYS_INLINE __mmask16 name##_half_f16(u16 *to, const u16 *a, const u16 *b,  \
                                            __mmask16 numbers)                    \
    {                                                                             \
        const __m512h x = _mm512_castsi512_ph(_mm512_loadu_si512(a));             \
        const __m512h z = x op _mm512_castsi512_ph(_mm512_loadu_si512(b));        \
        const __mmask32 is_nan = _mm512_cmp_ph_mask(z, z, _CMP_UNORD_Q);          \
        _mm512_storeu_si512(to, _mm512_mask_mov_epi16(_mm512_castph_si512(z), is_nan, \
                                                      _mm512_set1_epi16(0x7e00))); \
        return numbers;                                                           \
    }                                                                             \
    BOTH_HALVES(name, f16)
#else
#define F16_AT_ONCE(name, op)                                                     \
    ALWAYS_INLINE __mmask16 name##_half_f16(u16 *to, const u16 *a, const u16 *b,  \
                                            __mmask16 numbers)                    \
    {                                                                             \
        const __m512 x = F16_WIDEN(a) op F16_WIDEN(b);                            \
        const __m512 y = F16_WIDEN(a + 16) op F16_WIDEN(b + 16);                  \
        _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph(x, 0));                \
        _mm256_storeu_si256((__m256i *)(to + 16), _mm512_cvtps_ph(y, 0));         \
        return NUMBERS_IN(x, y, numbers);                                         \
    }                                                                             \
    BOTH_HALVES(name, f16)
#endif

F16_AT_ONCE(sum, +)
F16_AT_ONCE(product, *)
