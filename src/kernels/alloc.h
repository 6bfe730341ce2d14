/* Memory for new arrays. */
#ifndef CYDIST_ALLOC_H
#define CYDIST_ALLOC_H

#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "machine.h"

enum { CYDIST_MANY_PAGES = 4 << 20 };

/* Aligned to a cache line, for free(); NULL: no memory. Long memory is in huge pages, if the
   system gives them on request. */
static inline void *cydist_room(size_t nbytes)
{
    void *room = NULL;
    if (nbytes == 0 || posix_memalign(&room, CYDIST_LINE, nbytes) != 0) return NULL;
#ifdef MADV_HUGEPAGE
    if (nbytes >= CYDIST_MANY_PAGES) {
        const size_t before = -(uintptr_t)room & ((size_t)sysconf(_SC_PAGESIZE) - 1);
        madvise((char *)room + before, nbytes - before, MADV_HUGEPAGE);
    }
#endif
    return room;
}

#endif
