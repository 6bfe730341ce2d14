"""Messages between the ranks of one process; see src/transports/inproc/inproc_mailbox.pyx."""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from cydist._native.abi cimport Request, Comm
from cydist._native.linux cimport pthread_mutex_t
from cydist._native.matching cimport Queues


ctypedef struct Mailbox:        # one rank's state that the others share
    pthread_mutex_t lock
    Queues queues               # guarded by the lock
    size_t held_bytes           # in messages that were copied; guarded by the lock
    uint32_t doorbell           # changes whenever a request of this rank completes
    uint32_t sleepers
    int closed                  # OK, or CLOSED once the rank has left


ctypedef struct HubEnd:         # one rank's end of a hub
    int rank
    int size
    int spins                   # looks at a word before a wait sleeps
    int most_spins
    Mailbox *boxes              # the hub's, one per rank


cdef int init_box(Mailbox *box) noexcept nogil          # OK or NO_MEMORY
cdef void free_box(Mailbox *box) noexcept nogil

# A comm's functions; its link is a HubEnd.
cdef int send(Comm *t, Request *r) noexcept nogil
cdef int recv(Comm *t, Request *r) noexcept nogil
cdef int test(Comm *t, Request *r) noexcept nogil
cdef int wait(Comm *t, Request *r, int64_t deadline_ns) noexcept nogil
cdef void cancel(Comm *t, Request *r) noexcept nogil
cdef bint contradicted(Comm *t, Request *r) noexcept nogil
cdef bint left_over(Comm *t, uint64_t seq, Request *r) noexcept nogil

# A group begins here.
cdef int enter_comm(HubEnd *end, Comm *t) noexcept nogil    # OK or NO_MEMORY
# A group is gone: drop its messages that arrived at this rank.
cdef void drop_comm(HubEnd *end, uint64_t comm_id) noexcept nogil
# Leave: from now on no rank can send to this rank, or waits for it.
cdef void leave_hub(HubEnd *end) noexcept nogil
