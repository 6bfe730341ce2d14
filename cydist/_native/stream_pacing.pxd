"""Both ways of a slow network in step.

What a rank sends leaves through the same queue as the acknowledgements of what it receives. On a
network slower than memory that queue grows. Then the side with more bytes under way slows the
other, and in the end is alone on the wire. So a rank that sends and receives at once writes only so
many bytes more than it has read as its connection delivers in two milliseconds. TCP tells how many
that are. On a fast network algorithms have fewer under way anyway.

Bytes wait for half of the time at most that the network spends on those before them. One way alone
never waits.
"""
from libc.stdint cimport int64_t


ctypedef struct Exchange:       # of a rank's sockets together
    bint paced                  # some connection is slow
    int64_t ahead               # bytes written beyond those read
    int64_t period_ns           # what a slow connection takes for the bytes that it may be ahead
    int64_t began               # the present such period
    size_t read_now, read_before    # bytes in it and in the one before
    int64_t paused_at           # since when bytes wait; 0: none do


ctypedef struct Pace:           # of one connection
    size_t most_ahead           # bytes; 0: it is fast, or not measured yet
    int64_t written_at          # when long data were written last
    size_t unmeasured           # bytes written since the last look
    int64_t delivered           # bytes, ever, at the last measurement
    int64_t busy_us


# Return how many of `nbytes` may be written now.
cdef size_t room(Exchange *e, const Pace *p, size_t nbytes, int64_t now) noexcept nogil
# Account for long data that a socket has taken, and for any bytes that came through one.
cdef void count_written(Exchange *e, size_t nbytes) noexcept nogil
cdef void count_read(Exchange *e, size_t nbytes, int64_t now) noexcept nogil
# The same long data: now and then look how fast this connection delivers, which costs a system
# call.
cdef void measure(Exchange *e, Pace *p, int fd, size_t nbytes, int64_t now) noexcept nogil
# It has delivered so many bytes in so many microseconds.
cdef void set_pace(Exchange *e, Pace *p, int64_t nbytes, int64_t busy_us,
                   int64_t round_trip_us) noexcept nogil
