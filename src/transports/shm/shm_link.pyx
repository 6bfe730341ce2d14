"""Ranks of one host: windows in shared memory, and a link for messages."""
cimport cython
from libc.errno cimport ESRCH, errno
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free

from cydist._native.abi cimport (
    Link, OK, PEER_LOST, Comm, UNREACHABLE, Window, Windows, first_count, slice_end,
)
from cydist._native.linux cimport getpid, iovec, process_vm_readv, process_vm_writev, usleep
from cydist._native.matching cimport group_rank
from cydist._native.shm_memory cimport (
    BUSY, LEAVING, BeginMemory, SharedMemory, give_back, whole_pages,
)
from cydist._native.shm_peers cimport LocalPeers, LocalPeersHandle, close_local_peers, has_ended
from cydist._native.sync cimport LOOKS, SPINS, load_int, store_int
from cydist._native.window_flags cimport (
    begin_flags, lay_out, raise_flag, wait_flag, window_bytes,
)

cdef enum:
    SLOTS = 8                   # of every group's windows
    SLOT_BYTES = 131072
    FIRST_PAUSE_US = 20         # of a rank that waits for the table of the memory
    LONGEST_PAUSE_US = 5000


ctypedef struct ShmWindows:     # the object that t.windows points to
    Windows windows             # must be the first member
    LocalPeers *shm


cdef void begin_windows(char *memory, int size) noexcept nogil:
    begin_flags(memory, size, SLOTS, SLOT_BYTES)


cdef bint is_gone(Comm *t, int peer) noexcept nogil:
    """Return whether this rank has announced its departure or its process has ended."""
    cdef LocalPeers *n = (<ShmWindows *>t.windows).shm
    cdef int place = n.place[t.peers[peer]]
    return load_int(&n.members[place].left) != 0 or has_ended(n, place)


cdef bint process_ended(Comm *t, int peer) noexcept nogil:
    cdef LocalPeers *n = (<ShmWindows *>t.windows).shm
    return has_ended(n, n.place[t.peers[peer]])


cdef int reach_into(Comm *t, int peer, char *ours, char *theirs, size_t nbytes,
                    bint writing) noexcept nogil:
    """Copy between the memories of two processes."""
    cdef LocalPeers *n = (<ShmWindows *>t.windows).shm
    cdef int pid = n.pids[n.place[t.peers[peer]]]
    cdef iovec here = iovec(ours, nbytes)
    cdef iovec there = iovec(theirs, nbytes)
    cdef ssize_t done
    while True:
        if writing:
            done = process_vm_writev(pid, &here, 1, &there, 1, 0)
        else:
            done = process_vm_readv(pid, &here, 1, &there, 1, 0)
        if done < 0 and errno == ESRCH:
            return PEER_LOST
        if done == <ssize_t>here.iov_len:
            return OK
        if done <= 0:
            return UNREACHABLE
        here = iovec(<char *>here.iov_base + done, here.iov_len - done)
        there = iovec(<char *>there.iov_base + done, here.iov_len)


cdef int pull(Comm *t, int peer, char *into, const char *theirs,
              size_t nbytes) noexcept nogil:
    return reach_into(t, peer, into, <char *>theirs, nbytes, False)


cdef int push(Comm *t, int peer, char *theirs, const char *source,
              size_t nbytes) noexcept nogil:
    return reach_into(t, peer, <char *>source, theirs, nbytes, True)


cdef char *mapped(Comm *t, int peer, char *theirs, size_t nbytes) noexcept nogil:
    cdef LocalPeers *n = (<ShmWindows *>t.windows).shm
    cdef uint64_t offset = <uint64_t>theirs - n.members[n.place[t.peers[peer]]].base
    if n.limit <= offset < n.nbytes and nbytes <= n.nbytes - offset:
        return n.base + offset
    return NULL


cdef bint all_local(const LocalPeers *n, const Comm *t) noexcept nogil:
    """Return whether all members of the group share memory."""
    cdef int i
    for i in range(t.size):
        if n.place[t.peers[i]] < 0:
            return False
    return True


# A group that ends needs the memory, so the collector must not clear it before.
@cython.no_gc_clear
cdef class ShmLink(Link):
    """A link whose groups have windows where all members share memory.

    Args:
        messages: The link that carries messages, through rings in the same memory.
        memory: Shared with the ranks in `sharers`, in this order on all of them.
        sharers: The process of each.

    Attributes:
        heap: Allocates arrays from this rank's part of it.
    """

    cdef readonly Link messages
    cdef readonly SharedMemory memory
    cdef readonly object heap
    cdef LocalPeersHandle peers_handle
    cdef LocalPeers *shm
    cdef bint closed
    cdef int most_spins
    cdef list unfinished        # groups that could not be left yet, by comm_id

    def __init__(self, Link messages not None, SharedMemory memory not None, sharers):
        self.unfinished = []
        self.messages = messages
        self.memory = memory
        self.rank = messages.rank
        self.size = messages.size
        self.peers_handle = LocalPeersHandle(memory, self.rank, self.size, sharers)
        self.shm = self.peers_handle.table
        self.heap = memory.heap(self.shm.own)
        messages.share(self.peers_handle)
        self.most_spins = SPINS if self.shm.cores >= len(sharers) else 0

    @property
    def cores(self):
        """Return how many cores there are on which the sharers may run."""
        return self.shm.cores

    cdef int attach_comm(self, Comm *t) except -1:
        return self.messages.attach_comm(t)

    cdef int open_windows(self, Comm *t, int64_t deadline_ns, int *peer) except -100:
        cdef size_t nbytes = t.size * window_bytes(SLOTS, SLOT_BYTES)
        cdef uint64_t offset, fresh = 0
        cdef ShmWindows *made
        cdef LocalPeers *n = self.shm
        cdef int holder, pause = FIRST_PAUSE_US, status = OK
        cdef BeginMemory begin = NULL
        if not all_local(n, t):
            return OK
        if first_count() != 0:
            begin = begin_windows
        self.leave_late()
        nbytes = whole_pages(nbytes)
        made = <ShmWindows *>calloc(1, sizeof(ShmWindows) + t.size * sizeof(Window))
        if made == NULL:
            raise MemoryError(f"no memory for the windows of {t.size} ranks")
        with nogil:
            self.mark_dead()
            offset = self.memory.open_region(t.comm_id, t.peers, n.place, t.size, n.own, nbytes,
                                             &fresh, &holder, begin)
            while offset == BUSY:
                # The rank that holds the lock, or zeroes the windows, may be stopped.
                status = slice_end(t, deadline_ns)
                if status != OK:
                    break
                usleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_US)
                if holder >= 0:
                    self.mark_dead()
                offset = self.memory.open_region(t.comm_id, t.peers, n.place, t.size, n.own, nbytes,
                                                 &fresh, &holder, begin)
            if fresh != 0:
                give_back(n.head, fresh, nbytes)
        if status != OK:
            peer[0] = group_rank(t, n.ranks[holder]) if holder >= 0 else -1
        if offset == 0 or status != OK:
            free(made)
            return status
        made.shm = n
        made.windows.of = <Window *>(made + 1)
        made.windows.spins = made.windows.most_spins = self.most_spins
        made.windows.looks = made.windows.most_looks = LOOKS if self.most_spins else 0
        made.windows.is_gone = is_gone
        made.windows.process_ended = process_ended
        made.windows.pull = pull
        made.windows.push = push
        if n.limit < n.nbytes:
            made.windows.mapped = mapped
        lay_out(&made.windows, self.memory.base + offset, t.size, SLOTS, SLOT_BYTES, n.cores)
        t.raise_flag = raise_flag
        t.wait_flag = wait_flag
        t.windows = &made.windows
        return OK

    cdef void mark_dead(self) noexcept nogil:
        cdef LocalPeers *n = self.shm
        cdef int i
        for i in range(n.places):
            if i != n.own and has_ended(n, i):
                self.memory.mark_dead(i)

    cdef void leave_late(self) noexcept:
        """Leave the groups whose end found the table locked."""
        cdef uint64_t comm_id
        while self.unfinished:
            comm_id = self.unfinished.pop()
            with nogil:
                self.memory.leave_late(comm_id, self.shm.own)

    cdef void detach_comm(self, Comm *t) noexcept:
        self.messages.detach_comm(t)
        self.close_windows(t)

    cdef void close_windows(self, Comm *t) noexcept:
        cdef LocalPeers *n = self.shm
        cdef bint left, patient
        # A forked child leaves no group.
        if getpid() == self.memory.pid and all_local(n, t):
            patient = not self.unfinished
            with nogil:
                left = self.memory.leave_region(t.comm_id, t.peers, n.place, t.size, n.own, patient)
            if not left:
                self.unfinished.append(t.comm_id)
        free(t.windows)
        t.windows = NULL

    def close(self):
        """Leave: ranks that wait for this rank's windows learn that it is gone."""
        if not self.closed:
            self.closed = True
            if getpid() == self.memory.pid:
                store_int(&self.shm.members[self.shm.own].left, LEAVING)
        self.messages.close()
        with nogil:
            close_local_peers(self.shm)

    def lost(self, int peer):
        """Return why this peer cannot be reached any more, for messages; "" while it can."""
        cdef int place = self.shm.place[peer] if 0 <= peer < self.size else -1
        if place < 0 or peer == self.rank:
            return self.messages.lost(peer)
        if load_int(&self.shm.members[place].left):
            return "it closed its connections and left"
        reason = self.messages.lost(peer)
        if not reason and getpid() == self.memory.pid and has_ended(self.shm, place):
            return ("its process ended without a goodbye: it was killed, it failed, or it ended "
                    "without destroy_process_group")
        return reason

    def process_of(self, int peer):
        """Return the process of a peer that shares memory with this rank; 0: it does not."""
        cdef int place = self.shm.place[peer] if 0 <= peer < self.size else -1
        return self.shm.pids[place] if place >= 0 else 0
