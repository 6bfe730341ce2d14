"""A link whose other ranks are reached by a library that is made up: see ForeignTransport."""
from libc.stdint cimport int64_t
from libc.string cimport memset

from cydist._native.abi cimport COLLECTIVE_TAG, OK, PENDING, Comm, Request, now_ns
from cydist._native.stream cimport ForeignTransport, Net
from cydist._native.stream_link cimport MessageLink
from cydist._native.stream_progress cimport wait
from cydist._native.stream_send cimport begin_request, finish_request


cdef enum:
    LONGEST_NS = 20000000000    # for what takes a millisecond
    STALL_NS = 50000000         # more than one slice of a wait


ctypedef struct Library:
    ForeignTransport foreign                # must be the first member
    Request message
    int polls, arrives          # how often it was polled; at which poll the message arrives
    int stalls                  # at which poll the process gets no core for a while


cdef bint progress(Net *net) noexcept nogil:
    cdef Library *library = <Library *>net.foreign
    cdef int64_t end
    library.polls += 1
    if library.polls == library.stalls:
        end = now_ns() + STALL_NS
        while now_ns() < end:
            pass
    if library.polls != library.arrives:
        return False
    finish_request(net, &library.message, OK)
    return True


cdef bint allowed(const Net *net) noexcept nogil:
    return True


cdef void give_up(Net *net, Request *r) noexcept nogil:
    pass                        # no rank ever leaves


cdef void leave(Net *net) noexcept nogil:
    pass


cdef class ForeignTrial(MessageLink):
    """One of two ranks.

    Args:
        spins: How often a wait looks for its message before it yields its core.
    """

    cdef Library library

    def __cinit__(self, int rank, int size, int spins):
        memset(&self.library, 0, sizeof(Library))
        self.library.foreign.needed = True
        self.library.foreign.progress = progress
        self.library.foreign.allowed = allowed
        self.library.foreign.give_up = give_up
        self.library.foreign.leave = leave
        self.net.foreign = &self.library.foreign
        self.net.spins = self.net.most_spins = spins

    def polls_to_receive(self, int arrives, int stalls=0):
        """Wait for a message that arrives at that poll. Return how often the library is polled.

        Args:
            stalls: At which poll the process gets no core for 50 ms; 0: at none.
        """
        cdef Request *r = &self.library.message
        cdef Comm comm
        cdef int aborted = OK
        memset(&comm, 0, sizeof(Comm))
        memset(r, 0, sizeof(Request))
        comm.link = self.net
        comm.aborted = &aborted
        r.place = self.net.foreign
        r.tag = COLLECTIVE_TAG
        r.status = PENDING
        self.library.polls = 0
        self.library.arrives = arrives
        self.library.stalls = stalls
        with nogil:
            begin_request(self.net, r)
            if wait(&comm, r, now_ns() + LONGEST_NS) != OK:
                self.library.polls = -1
        return self.library.polls
