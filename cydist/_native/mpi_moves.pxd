"""One rank's end of an MPI communicator, as its groups share it; see src/transports/mpi.pyx."""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from cydist._native.abi cimport Fingerprint, Request, Transport
from cydist._native.libmpi cimport Handle
from cydist._native.linux cimport pthread_mutex_t
from cydist._native.matching cimport Item, Queues

cdef enum:
    INLINE_BYTES = 8192         # what travels with its header
    SLOTS = 8                   # headers that MPI may receive while nobody looks


ctypedef struct Header:         # what comes first
    uint64_t context
    uint64_t tag
    uint64_t nbytes
    int peer                    # who sends
    int under                   # MPI's tag of the payload; 0: it is behind this; -1: goodbye
    Fingerprint fingerprint


ctypedef struct Slot:           # a header to come
    Handle request
    Header header
    char data[INLINE_BYTES]


ctypedef struct Move:           # what MPI is moving: a message, or a collective
    Move *next
    Move *prev
    Request *request            # that ends with it; NULL: nobody waits for it
    uint64_t context
    int peer                    # of the link; -1: all
    bint borrows                # MPI uses memory that is not `data`
    bint lingers                # and nobody waits for it
    char *data                  # freed with it
    size_t nbytes               # of a message in `data`
    int count
    int done
    Handle handles[1]           # as many as `count`


ctypedef struct Net:
    pthread_mutex_t lock        # of all of this
    int rank
    int size
    Handle comm
    Handle byte                 # MPI_BYTE
    int any_source              # MPI_ANY_SOURCE
    size_t piece_bytes          # one call of MPI moves no more
    Queues queues
    Slot *slots
    int slot                    # the oldest
    Move moves                  # the head of the ring of those under way
    size_t held_bytes           # in messages that were copied to be sent
    size_t lingering            # moves that MPI goes on with in memory nobody waits for
    int64_t *left_at            # when each peer said goodbye; 0: it is there
    int left                    # how many have
    int error                   # the last that MPI reported
    uint32_t under              # how many payloads went under a tag of their own
    int spins
    int most_spins
    bint closed
    int pid


# A move of `count` requests to come, in the ring; NULL: no memory. The lock is held.
cdef Move *new_move(Net *net, Request *r, uint64_t context, int peer, int count) noexcept nogil
# It could not begin, or is over.
cdef void end_move(Net *net, Move *move, int status) noexcept nogil
# Do what can be done at once. The lock is held.
cdef void progress(Net *net) noexcept nogil
# Nobody waits for it any more; MPI goes on. Its request ends so, unless with PENDING.
cdef void detach(Net *net, Move *move, int status) noexcept nogil
# Begin to send; OK, or why not.
cdef int begin_send(Net *net, const Transport *t, Request *r) noexcept nogil
# Begin to receive the next header.
cdef void listen(Net *net, Slot *slot) noexcept nogil
# The header of a message that has come, and was kept.
cdef Header header_of(const Item *item) noexcept nogil
# Fill a receive, or begin to. It stands in no queue.
cdef void deliver(Net *net, Request *r, const Transport *view, const Header *header,
                  const char *data) noexcept nogil
# Has the link peer left, or everybody else of the group for ANY_SOURCE?
cdef bint nobody_left(const Net *net, const Transport *t, int peer) noexcept nogil
# A message whose other side left a while ago does not complete.
cdef void give_up(Net *net, Request *r) noexcept nogil
# A group is gone: drop what came for it, and end what it has under way.
cdef void drop_context(Net *net, uint64_t context) noexcept nogil
# Drop all messages that have come.
cdef void drop_all(Net *net) noexcept nogil
cdef void say_goodbye(Net *net, int peer) noexcept nogil
# Everybody has said goodbye, so nothing comes any more.
cdef void end_slots(Net *net) noexcept nogil
# Is there nothing under way but what nobody waits for?
cdef bint all_linger(const Net *net) noexcept nogil
