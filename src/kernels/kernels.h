/* Loops over elements. Plain C and libc: code for several instruction sets is here, decisions
   are in kernels.pyx. */
#ifndef CYDIST_KERNELS_H
#define CYDIST_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "reduction.h"

/* The order of both enums is part of the wire format. */
typedef enum {
    DT_OTHER, /* any fixed-size element that is moved, never reduced */
    DT_BOOL,  /* one byte; any nonzero is true, results are 0 or 1 */
    DT_I8,
    DT_U8,
    DT_I16,
    DT_U16,
    DT_I32,
    DT_U32,
    DT_I64,
    DT_U64,
    DT_F16,
    DT_BF16,
    DT_F32,
    DT_F64,
    DT_C64,
    DT_C128,
    DT_F8E4M3FN,
    DT_F8E5M2,
    DT_COUNT
} cydist_dtype;

typedef enum {
    OP_NONE,
    OP_SUM,
    OP_PRODUCT,
    OP_MIN,
    OP_MAX,
    OP_BAND,
    OP_BOR,
    OP_BXOR,
    OP_AVG,
    OP_PREMUL_SUM,
    OP_COUNT
} cydist_op;

/* All loops of one instruction set; NULL if op is not defined for dtype. */
typedef struct {
    const char *isa;
    void (*combine[DT_COUNT][OP_COUNT])(const cydist_reduction *r, void *acc, const void *low,
                                        const void *high, size_t count);
    void (*combine_all[DT_COUNT][OP_COUNT])(const cydist_reduction *r, void *out,
                                            const void *const *sources, int sources_count,
                                            size_t count);
    /* for PREMUL_SUM; r->context is the factor: one float64, two if dtype is complex */
    void (*prepare[DT_COUNT])(const cydist_reduction *r, void *out, const void *own,
                              size_t count);
    /* for AVG */
    void (*finish[DT_COUNT])(const cydist_reduction *r, void *acc, size_t count);
} cydist_kernels;

#if defined(__x86_64__) && defined(__GNUC__) && !defined(CYDIST_BASELINE_ONLY)
#define CYDIST_X86
extern const cydist_kernels cydist_kernels_avx2, cydist_kernels_avx512;
#if defined(__clang__) ? __clang_major__ >= 14 : __GNUC__ >= 12
#define CYDIST_AVX512FP16
extern const cydist_kernels cydist_kernels_avx512bf16, cydist_kernels_avx512fp16;
#endif
#endif
extern const cydist_kernels cydist_kernels_baseline;

/* The variants that this machine can run, slowest first; NULL when there is no such index.
   Index 0 is the baseline and always there. */
const cydist_kernels *cydist_variant(int index);

/* Copy rows x cols runs of run_bytes each between packed and strided memory. In packed memory
   the runs of a row touch and rows are packed_row bytes apart; in the array runs are array_col
   and rows array_row bytes apart. */
void cydist_pack_rows(char *packed, const char *array, size_t rows, size_t cols,
                      size_t run_bytes, size_t packed_row, ptrdiff_t array_row,
                      ptrdiff_t array_col);
void cydist_unpack_rows(char *array, const char *packed, size_t rows, size_t cols,
                        size_t run_bytes, size_t packed_row, ptrdiff_t array_row,
                        ptrdiff_t array_col);

/* Copy blocks to or from one contiguous buffer, in order. */
void cydist_flatten(char *out, const char *const *blocks, const size_t *nbytes, size_t count);
void cydist_unflatten(char *const *blocks, const char *flat, const size_t *nbytes, size_t count);

#endif
