/* The loops for AVX2 and F16C. Without FMA: a fused product gives other bits. */
#include "narrow_floats.h"
#include "kernels.h"

#ifdef CYDIST_X86
#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif

ALWAYS_INLINE __m128i avx2_f16_narrow(__m256 x)
{
    const __m256 is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    return _mm256_cvtps_ph(_mm256_blendv_ps(x, _mm256_set1_ps(__builtin_nanf("")), is_nan), 0);
}

#define F16_LANES 8
#define F16_WIDEN(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#define F16_NARROW(to, from) \
    _mm_storeu_si128((__m128i *)(to), avx2_f16_narrow(from))
#define F16_GET(p) _mm256_load_ps(p)
#define F16_PUT(p, x) _mm256_store_ps(p, x)

#define ISA "avx2"
#define KERNELS cydist_kernels_avx2
#include "reduce_body.h"

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
