/* The loops for the AVX-512 of all server processors since 2017: F, BW, DQ and VL. */
#include "narrow_floats.h"
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

#include "avx512.h"

#define ISA "avx512"
#define KERNELS cydist_kernels_avx512
#include "reduce_body.h"

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
