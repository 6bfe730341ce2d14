/* The loops for AVX-512 with conversion to bfloat16, but without arithmetic of float16: AMD's
   processors since 2022, in which the conversion is fast. */
#include "narrow_floats.h"
#include "kernels.h"

#ifdef CYDIST_AVX512FP16
#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi2,avx512bf16,f16c"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target( \
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi2,avx512bf16,f16c,prefer-vector-width=512")
#endif

#define BF16_CONVERSION
#define FUNNEL_SHIFT
#include "avx512.h"

#define ISA "avx512bf16"
#define KERNELS cydist_kernels_avx512bf16
#include "reduce_body.h"

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
