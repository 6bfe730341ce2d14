"""Messages, as Python posts them and as the fast path hands over those that fail."""
from libc.stdint cimport uint64_t

from cydist._native.abi cimport Fingerprint, Request
from cydist._native.array cimport Array
from cydist._native.group cimport Group
from cydist._native.recent_calls cimport RecentCall


cdef class Message:
    cdef Group group
    cdef Array array
    cdef Request request
    cdef Fingerprint fingerprint
    cdef bint group_failed          # it ended because the group failed on another rank
    cdef RecentCall *recent         # its entry in the ring of recent calls, while it has this
    cdef uint64_t version           # version; NULL: it has ended

    cdef bint has_entry(self) noexcept
    cdef void note_if_over(self) noexcept
    cdef void end_with_group(self)
    cdef void withdraw(self, int status)
    cdef int peer(self) noexcept

# Return the Message of a request that is over, with this Status; `f` is its fingerprint.
cdef Message ended_message(Group group, const Request *r, const Fingerprint *f, int status,
                           bint group_failed)
