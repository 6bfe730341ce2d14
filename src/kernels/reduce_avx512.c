/* The loops for AVX-512 as all server processors since 2017 have it: F, BW, DQ and VL. */
#include "formats.h"
#include "kernels.h"

#ifdef CYDIST_X86
#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c,prefer-vector-width=512")
#endif

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

#define ISA "avx512"
#define KERNELS cydist_kernels_avx512
#include "reduce_body.h"

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
