"""How the ranks of an MPI communicator part: by a word, or by their death."""
from libc.stdint cimport uint64_t

from cydist._native.mpi_messages cimport Mpi
from cydist._native.stream cimport Net


# MPI has reported an error: give up the ranks that died, if it was that.
cdef void bury(Mpi *mpi) noexcept nogil
# Tell a peer what a header without a message says, behind all that was sent to it.
cdef void say(Mpi *mpi, int peer, int what, uint64_t context) noexcept nogil
cdef void hear_goodbye(Mpi *mpi, int peer) noexcept nogil
# Say goodbye to every peer. What has begun goes on while MPI is asked to.
cdef void leave(Net *net) noexcept nogil
