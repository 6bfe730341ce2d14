/* The loops for what every machine of this architecture has. */
#define ISA "baseline"
#define KERNELS cydist_kernels_baseline
#include "reduce_body.h"
