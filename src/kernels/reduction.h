/* A reduction as algorithms see it; cydist/_native/abi.pxd declares the same struct to Cython
   and says what each member promises. */
#ifndef CYDIST_REDUCTION_H
#define CYDIST_REDUCTION_H

#include <stddef.h>

typedef struct cydist_reduction cydist_reduction;

struct cydist_reduction {
    size_t itemsize;
    int commutative;
    void *context;
    int ranks;
    void (*combine)(const cydist_reduction *r, void *acc, const void *low, const void *high,
                    size_t count);
    void (*combine_all)(const cydist_reduction *r, void *out, const void *const *sources,
                        int sources_count, size_t count);
    void (*prepare)(const cydist_reduction *r, void *out, const void *own, size_t count);
    void (*finish)(const cydist_reduction *r, void *acc, size_t count);
};

#endif
