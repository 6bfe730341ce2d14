/* A copy that is equally fast at all addresses; a copy of memory onto itself does nothing. */
#ifndef CYDIST_COPY_H
#define CYDIST_COPY_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "machine.h"

/* From some KiB on, memcpy may be one instruction of the processor, `rep movsb`. On AMD's Zen 4
   that moves 3 GB/s instead of 50 if the target begins less than 16 bytes after the source, with
   both counted within a page. Vector registers still copy pieces this short. */
enum { CYDIST_CLOSE = 16, CYDIST_SHORT_PIECE = 1024 };

static inline void cydist_copy(char *to, const char *from, size_t nbytes)
{
    if (nbytes > CYDIST_SHORT_PIECE
        && ((uintptr_t)to - (uintptr_t)from - 1) % CYDIST_PAGE < CYDIST_CLOSE - 1)
        while (nbytes > CYDIST_SHORT_PIECE) {
            size_t piece = CYDIST_SHORT_PIECE;
#if defined(__GNUC__)
            __asm__("" : "+r"(piece));      /* with a known length it would become `rep movsq` */
#endif
            memcpy(to, from, piece);
            to += piece;
            from += piece;
            nbytes -= piece;
        }
    if (to != from && nbytes != 0) memcpy(to, from, nbytes);
}

#endif
