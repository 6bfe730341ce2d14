/* The loops for every machine of this architecture. */
#define ISA "baseline"
#define KERNELS cydist_kernels_baseline
#include "reduce_body.h"
