"""The choice of segments on a network that the test makes up: see pace.pxd."""
from libc.string cimport memset

from cydist._native.abi cimport ALL_GATHER, now_ns
from cydist._native.pace cimport Pace, note_exchange, paced_segment


cdef class PaceTrial:
    """Rank 0 of a group on two hosts."""

    cdef Pace pace

    def __cinit__(self):
        memset(&self.pace, 0, sizeof(Pace))

    def segment(self, size_t segment):
        """Return the segment of the next long call, where others have this one."""
        return paced_segment(&self.pace, segment)

    def carry(self, size_t nbytes, microseconds):
        """End the call, in which the host has sent so much in that time."""
        note_exchange(&self.pace, ALL_GATHER, 2 * nbytes, 2, now_ns() - 1000 * microseconds)
