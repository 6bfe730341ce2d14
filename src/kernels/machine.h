/* Of the machine, as cydist counts: part of the layout of shared memory. */
#ifndef CYDIST_MACHINE_H
#define CYDIST_MACHINE_H

enum { CYDIST_PAGE = 4096, CYDIST_LINE = 64 /* a cache line */ };

#endif
