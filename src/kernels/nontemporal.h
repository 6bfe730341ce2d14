/* A copy that bypasses the caches, for blocks too long to be found there later. */
#ifndef CYDIST_STREAM_H
#define CYDIST_STREAM_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

/* Stores of other lines may overtake these, until cydist_stream_end. */
static inline void cydist_stream_lines(char *to, const char *from, size_t nbytes)
{
#if defined(__SSE2__)
    const size_t head = -(uintptr_t)to & 63;
    if (nbytes >= head + 64) {
        if (head != 0) memcpy(to, from, head);
        to += head;
        from += head;
        nbytes -= head;
        for (; nbytes >= 64; to += 64, from += 64, nbytes -= 64) {
            const __m128i a = _mm_loadu_si128((const __m128i *)from);
            const __m128i b = _mm_loadu_si128((const __m128i *)from + 1);
            const __m128i c = _mm_loadu_si128((const __m128i *)from + 2);
            const __m128i d = _mm_loadu_si128((const __m128i *)from + 3);
            _mm_stream_si128((__m128i *)to, a);
            _mm_stream_si128((__m128i *)to + 1, b);
            _mm_stream_si128((__m128i *)to + 2, c);
            _mm_stream_si128((__m128i *)to + 3, d);
        }
    }
#endif
    if (nbytes != 0) memcpy(to, from, nbytes);
}

/* A reader that sees this thread's next store sees the lines too. */
static inline void cydist_stream_end(void)
{
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

static inline void cydist_stream(char *to, const char *from, size_t nbytes)
{
    cydist_stream_lines(to, from, nbytes);
    cydist_stream_end();
}

#endif
