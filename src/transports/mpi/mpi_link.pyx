"""Messages over one MPI communicator, and through rings to ranks of the same host, with any comm id
and tag, compared, with deadlines.

MPI makes progress only when it is called. A waiting thread does that for all groups of the link.
"""
cimport cython
from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free

from cydist._native.abi cimport Comm, first_count, now_ns
from cydist._native.libmpi cimport SUCCESS, is_done
from cydist._native.linux cimport (
    getpid, pthread_mutex_lock, pthread_mutex_unlock, pthread_self,
)
from cydist._native.mpi_messages cimport (
    HEADERS, WITH_HEADER_BYTES, Arriving, FingerprintExchanges, Mpi, MpiRequest, drop_mpi_requests,
    init_mpi, may_call, mpi_of, progress,
)
from cydist._native.shm_peers cimport LocalPeersHandle
from cydist._native.stream_send cimport is_local
from cydist._native.stream_progress cimport progress as progress_all
from cydist._native.stream cimport DIED, Net
from cydist._native.stream_link cimport MessageLink
from cydist._native.sync cimport SPINS, sched_yield

cdef enum:
    MESSAGE_BYTES = 1073741824  # of one of MPI's: counts are 32-bit integers
    PATIENCE_NS = 1000000000    # the longest wait for a header whose sender may have died


cdef bint lingers(Comm *t) noexcept nogil:
    cdef Net *net = <Net *>t.link
    cdef Mpi *mpi = mpi_of(net)
    pthread_mutex_lock(&net.lock)
    # Not after the link was closed: MPI may be finalized, and would end this process.
    if mpi.lingering != 0 and not net.closed:
        progress(net)
    cdef bint found = mpi.lingering != 0 or net.lingering
    pthread_mutex_unlock(&net.lock)
    return found


cdef void end_headers(Mpi *mpi) noexcept nogil:
    """Probe for no further header: all ranks have sent departure notices, and none follows."""
    cdef int64_t until = now_ns() + PATIENCE_NS
    cdef int error = SUCCESS
    mpi.ended = True
    while mpi.headers != 0 and now_ns() < until:
        if is_done(&mpi.arriving[mpi.first].request, &error):
            mpi.first = (mpi.first + 1) % HEADERS
            mpi.headers -= 1
        else:
            sched_yield()


cdef bint all_linger(const Mpi *mpi) noexcept nogil:
    cdef const MpiRequest *mpi_request = mpi.requests.next
    while mpi_request != &mpi.requests:
        if not mpi_request.lingers:
            return False
        mpi_request = mpi_request.next
    return True


# See MessageLink.
@cython.no_gc_clear
cdef class MpiLink(MessageLink):
    """One rank's end of a communicator that only this link uses.

    Args:
        rank, size: This process among its members.
        comm, byte: MPI's handles of the communicator, and of the datatype BYTE.
        any_source: MPI's constant.
        here: Ranks on this host: they share its cores.
        largest_tag: The communicator's attribute TAG_UB.
        callers: Which threads may call MPI: 0 any, 1 all but those that run_in_background, 2 the
            one that makes this. The others' messages progress while one of these is in a call.
    """

    cdef Mpi *mpi
    cdef bint ended             # MPI uses none of its memory any more

    def __cinit__(self, int rank, int size, size_t comm, size_t byte, int any_source, int here,
                  int largest_tag, int callers=0):
        cdef int i
        self.mpi = <Mpi *>calloc(1, sizeof(Mpi))
        if self.mpi == NULL:
            raise MemoryError("no memory for a link")
        init_mpi(self.mpi)
        self.mpi.net = self.net
        self.mpi.comm = comm
        self.mpi.byte = byte
        self.mpi.any_source = any_source
        self.mpi.largest_tag = largest_tag
        self.mpi.callers = callers
        self.mpi.one = pthread_self()
        self.mpi.piece_bytes = MESSAGE_BYTES
        self.mpi.foreign.needed = size > 1
        self.mpi.left_at = <int64_t *>calloc(size, sizeof(int64_t))
        self.mpi.arriving = <Arriving *>calloc(HEADERS, sizeof(Arriving))
        self.mpi.under = <int *>calloc(size, sizeof(int))
        if self.mpi.left_at == NULL or self.mpi.arriving == NULL or self.mpi.under == NULL:
            raise MemoryError("no memory for a link")
        for i in range(size):
            self.mpi.under[i] = <int>(first_count() % largest_tag)
        self.mpi.polls = <unsigned int>first_count()
        self.net.foreign = &self.mpi.foreign
        self.net.spins = self.net.most_spins = SPINS // 10 if self.share_cores(here) else 0

    def __dealloc__(self):
        if self.mpi == NULL:
            return
        self.net.foreign = NULL
        free(self.mpi.under)
        # Memory that MPI may still write to is not freed.
        if self.ended:
            free(self.mpi.left_at)
            free(self.mpi.arriving)
            free(self.mpi)

    cdef int attach_comm(self, Comm *t) except -1:
        t.own = calloc(1, sizeof(FingerprintExchanges))
        if t.own == NULL:
            raise MemoryError("no memory for a group")
        MessageLink.attach_comm(self, t)
        t.lingers = lingers
        return 0

    cdef void detach_comm(self, Comm *t) noexcept:
        MessageLink.detach_comm(self, t)
        if self.net.pid == getpid():
            with nogil:
                pthread_mutex_lock(&self.net.lock)
                drop_mpi_requests(self.mpi, t.comm_id)
                pthread_mutex_unlock(&self.net.lock)
        free(t.own)
        t.own = NULL

    def share(self, LocalPeersHandle peers_handle not None):
        """As MessageLink's. MPI reaches all other ranks; if there are none, it is not polled."""
        MessageLink.share(self, peers_handle)
        self.mpi.foreign.needed = peers_handle.table.places < self.size

    def takes_layout(self, int peer, size_t nbytes) -> bool:
        """Return whether a message of `nbytes` to or from a named peer may have a layout. It may
        not if it travels with its header, through shared memory, or in pieces."""
        return (0 <= peer < self.size and WITH_HEADER_BYTES < nbytes <= self.mpi.piece_bytes
                and (self.net.shm == NULL or self.net.shm.place[peer] < 0))

    def thread_may_call(self) -> bool:
        """Return whether this thread may call MPI."""
        return may_call(self.net)

    def is_needed(self) -> bool:
        """Return whether MPI has messages to carry: not if all ranks share memory."""
        return self.mpi.foreign.needed

    def progress(self) -> None:
        """Make progress on started transfers, if this thread may."""
        with nogil:
            pthread_mutex_lock(&self.net.lock)
            progress_all(self.net)
            pthread_mutex_unlock(&self.net.lock)

    def advance(self) -> bool:
        """Make progress after `close`. Return whether every other rank has left and nothing is
        under way that may end."""
        cdef bint over
        with nogil:
            pthread_mutex_lock(&self.net.lock)
            progress(self.net)
            over = self.mpi.left >= self.size - 1 and all_linger(self.mpi)
            pthread_mutex_unlock(&self.net.lock)
        return over

    def end(self) -> bool:
        """Release MPI's memory after `close`, once `advance` returns True. Return whether MPI uses
        none of it any more. A collective that some rank never enters does not end."""
        if not self.ended:
            with nogil:
                pthread_mutex_lock(&self.net.lock)
                end_headers(self.mpi)
                pthread_mutex_unlock(&self.net.lock)
            self.ended = self.mpi.lingering == 0 and self.mpi.headers == 0
        return self.ended

    def lost(self, int peer):
        """As MessageLink's, where MPI may know of a death."""
        if 0 <= peer < self.size and self.net.lost[peer] == DIED and not is_local(self.net, peer):
            return "its process died, says MPI"
        return MessageLink.lost(self, peer)

    @property
    def error(self):
        """Return the last error code of MPI; 0: none."""
        return self.mpi.error

    @property
    def lingering(self):
        """Return the number of MPI transfers that still use memory though no thread waits for
        them."""
        return self.mpi.lingering

    @property
    def piece_bytes(self):
        """Return the most bytes that one call of MPI moves, equal on every rank."""
        return self.mpi.piece_bytes

    @piece_bytes.setter
    def piece_bytes(self, size_t nbytes):
        self.mpi.piece_bytes = nbytes
