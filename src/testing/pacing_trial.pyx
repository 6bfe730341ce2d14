"""Pacing by a clock that the test keeps: see stream_pacing.pxd."""
from libc.string cimport memset

from cydist._native.stream_pacing cimport (
    Exchange, Pace, count_read, count_written, room, set_pace,
)


cdef class PacingTrial:
    """One connection of a rank. Times are nanoseconds."""

    cdef Exchange exchange
    cdef Pace pace

    def __cinit__(self):
        memset(&self.exchange, 0, sizeof(Exchange))
        memset(&self.pace, 0, sizeof(Pace))

    def deliver(self, nbytes, busy_us, round_trip_us):
        """Measure that it has delivered so much; return how many bytes it may be ahead, or 0."""
        set_pace(&self.exchange, &self.pace, nbytes, busy_us, round_trip_us)
        return self.pace.most_ahead

    def write(self, nbytes, now):
        """Write as many of these bytes as it may; return how many."""
        cdef size_t allowed = room(&self.exchange, &self.pace, nbytes, now)
        count_written(&self.exchange, allowed)
        return allowed

    def read(self, nbytes, now):
        """Take bytes that have come."""
        count_read(&self.exchange, nbytes, now)
