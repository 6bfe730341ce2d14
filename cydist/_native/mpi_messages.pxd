"""One rank's end of an MPI communicator: the Far of a Net, whose lock is held around every call."""
from libc.stdint cimport int64_t, uint64_t

from cydist._native.abi cimport Fingerprint, Request
from cydist._native.libmpi cimport SUCCESS, Handle
from cydist._native.linux cimport pthread_t
from cydist._native.stream cimport ForeignTransport, Net

cdef enum Later:                # what a thread that may not call MPI leaves to those that may
    NOTHING = 0
    TO_SEND = 1
    TO_RECEIVE = 2


cdef enum:
    INLINE_BYTES = 8192         # what travels with its header
    SLOTS = 8                   # headers that MPI may receive while nobody looks
    GOODBYE = -1                # Header.under: the sender leaves the link
    FAREWELL = -2               # it has left the group of the header's context


ctypedef struct MpiHeader:         # what comes first
    uint64_t context
    uint64_t tag
    uint64_t nbytes
    int peer                    # who sends
    int under                   # MPI's tag of the payload; 0: it is behind this; or below it
    Fingerprint fingerprint


ctypedef struct Slot:           # a header to come
    Handle request
    MpiHeader header
    char data[INLINE_BYTES]


ctypedef struct MpiRequest:           # what MPI is moving: a message, or a collective
    MpiRequest *next
    MpiRequest *prev
    Request *request            # that ends with it; NULL: nobody waits for it
    uint64_t context
    int peer                    # of the link; -1: all
    bint borrows                # MPI uses memory that is not `data`
    bint lingers                # and nobody waits for it
    char *data                  # freed with it
    int count                   # requests: what MPI has taken
    int done
    int error                   # MPI's code for one that ended badly
    int later                   # Later: it has not begun; then `header` says what it is
    MpiHeader header
    Handle handles[1]           # of those, and room for more


ctypedef struct Mpi:
    ForeignTransport far                     # first
    Net *net
    Handle comm
    Handle byte                 # MPI_BYTE
    int any_source              # MPI_ANY_SOURCE
    size_t piece_bytes          # one call of MPI moves no more
    Slot *slots
    int slot                    # the oldest
    unsigned int turn           # how often MPI was asked
    MpiRequest moves                  # the head of the ring of those under way
    char *outbox                # in which the next small message is put together; or NULL
    size_t lingering            # moves that MPI goes on with in memory nobody waits for
    int64_t *left_at            # when each peer said goodbye; 0: it is there
    int left                    # how many have
    int error                   # the last that MPI reported
    int *under                  # the tag of the last payload to each peer
    int largest_tag             # MPI_TAG_UB
    int callers                 # Callers
    pthread_t one               # that made the link


cdef inline Mpi *mpi_of(const Net *net) noexcept nogil:
    return <Mpi *>net.far


cdef inline size_t pieces(const Mpi *mpi, size_t nbytes) noexcept nogil:
    return (nbytes + mpi.piece_bytes - 1) // mpi.piece_bytes


cdef inline int piece(const Mpi *mpi, size_t nbytes, size_t i) noexcept nogil:
    cdef size_t rest = nbytes - i * mpi.piece_bytes
    return <int>(rest if rest < mpi.piece_bytes else mpi.piece_bytes)


# Where the next request of a move goes.
cdef inline Handle *next_of(MpiRequest *move) noexcept nogil:
    return &move.handles[move.count]


# MPI's answer to it: SUCCESS, and it belongs to the move, or why not.
cdef inline int added(MpiRequest *move, int code) noexcept nogil:
    move.count += code == SUCCESS
    return code


# Nothing is under way; the functions of its Far.
cdef void init_mpi(Mpi *mpi) noexcept nogil
# May this thread call MPI?
cdef bint may_call(const Net *net) noexcept nogil
# A move of at most `room` requests to come, in the ring; NULL: no memory.
cdef MpiRequest *new_move(Mpi *mpi, Request *r, uint64_t context, int peer, int room) noexcept nogil
# MPI refuses the next, with this code. What it has taken goes on, in memory that lives as long.
cdef int refused(Mpi *mpi, MpiRequest *move, int code) noexcept nogil
# Do what can be done at once; was there anything?
cdef bint progress(Net *net) noexcept nogil
# Send a small message behind its header, or a header alone. OK: it is over; PENDING: its request
# will tell.
cdef int send_whole(Mpi *mpi, Request *r, int peer, const MpiHeader *header) noexcept nogil
# Begin to receive the next header.
cdef void listen(Mpi *mpi, Slot *slot) noexcept nogil
# A group is gone: end what it has under way.
cdef void drop_moves(Mpi *mpi, uint64_t context) noexcept nogil
