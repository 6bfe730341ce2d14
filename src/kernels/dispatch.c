/* The variants that this machine can run. */
#include "kernels.h"

#ifdef CYDIST_X86
#include <cpuid.h>

/* Older compilers do not know these names in __builtin_cpu_supports. */
static int has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}

/* VBMI2 with bfloat16 conversions, or with float16 arithmetic. */
static int has_avx512bf16(void)
{
    unsigned a, b, c, d, features;
    const unsigned vbmi2 = 1u << 6, bf16 = 1u << 5;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c & vbmi2) != 0 &&
           __get_cpuid_count(7, 1, &features, &b, &c, &d) && (features & bf16) != 0;
}

static int has_avx512fp16(void)
{
    unsigned a, b, c, d;
    const unsigned vbmi2 = 1u << 6, fp16 = 1u << 23;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c & vbmi2) != 0 && (d & fp16) != 0;
}
#endif

const cydist_kernels *cydist_variant(int index)
{
    if (index == 0) return &cydist_kernels_baseline;
#ifdef CYDIST_X86
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !has_f16c()) return NULL;
    if (index == 1) return &cydist_kernels_avx2;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return NULL;
    if (index == 2) return &cydist_kernels_avx512;
#ifdef CYDIST_AVX512FP16
    const cydist_kernels *const last = has_avx512fp16() ? &cydist_kernels_avx512fp16 : NULL;
    if (!has_avx512bf16()) return index == 3 ? last : NULL;
    if (index == 3) return &cydist_kernels_avx512bf16;
    if (index == 4) return last;
#endif
#endif
    return NULL;
}
