"""Ranks that leave, or die; see mpi_partings.pxd. The lock is held throughout."""
from libc.stdint cimport uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from cydist._native.abi cimport now_ns
from cydist._native.libmpi cimport find_dead
from cydist._native.mpi_messages cimport GOODBYE, MpiHeader, Mpi, mpi_of, progress, send_whole
from cydist._native.stream_send cimport is_near
from cydist._native.stream_peers cimport lose
from cydist._native.stream cimport DIED, LEFT, Net


cdef void bury(Mpi *mpi) noexcept nogil:
    cdef int i, count, peer
    cdef int *dead = <int *>malloc(mpi.net.size * sizeof(int))
    if dead == NULL:
        return
    count = find_dead(mpi.comm, mpi.net.size, dead)
    for i in range(count):
        peer = dead[i]
        if 0 <= peer < mpi.net.size and mpi.left_at[peer] == 0:
            mpi.left += 1
            mpi.left_at[peer] = now_ns()
            if not is_near(mpi.net, peer):
                lose(mpi.net, peer, DIED)
    free(dead)


cdef void hear_goodbye(Mpi *mpi, int peer) noexcept nogil:
    if mpi.left_at[peer] == 0:
        mpi.left += 1
        mpi.left_at[peer] = now_ns()
    # What a near one wrote to its ring comes before its end.
    if not is_near(mpi.net, peer):
        lose(mpi.net, peer, LEFT)


cdef void leave(Net *net) noexcept nogil:
    cdef Mpi *mpi = mpi_of(net)
    cdef int peer
    for peer in range(net.size):
        if peer != net.rank:
            say(mpi, peer, GOODBYE, 0)
    progress(net)


cdef void say(Mpi *mpi, int peer, int what, uint64_t context) noexcept nogil:
    cdef MpiHeader header
    memset(&header, 0, sizeof(MpiHeader))
    header.context = context
    header.peer = mpi.net.rank
    header.under = what
    send_whole(mpi, NULL, peer, &header)
