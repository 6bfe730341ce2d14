"""One rank's end of an MPI communicator, as a Net's foreign transport. The Net's lock is held."""
from libc.stdint cimport int64_t, uint64_t

from cydist._native.abi cimport Fingerprint, Request
from cydist._native.libmpi cimport SUCCESS, Handle
from cydist._native.linux cimport pthread_t
from cydist._native.stream cimport ForeignTransport, Net

cdef enum Postponed:            # a request that a thread without access to MPI leaves to another
    NOTHING = 0
    TO_SEND = 1
    TO_RECEIVE = 2


cdef enum:
    WITH_HEADER_BYTES = 32768   # payload that is sent with its header
    GOODBYE = -1                # MpiHeader.under: the sender's departure notice for the link
    FAREWELL = -2               # and for the group of the header's comm id
    HEADERS = 8                 # that MPI receives at once, and that one poll takes, at most
    SOON_NS = 20000000          # a call that takes longer looks for what is wrong
    DEPARTED_NS = 1000000000    # how long messages to and from a rank that left may still take


ctypedef struct MpiHeader:         # the first part of every message
    uint64_t comm_id
    uint64_t tag
    uint64_t nbytes
    int peer                    # the sender
    int under                   # MPI's tag of the payload; 0: it follows; or one of the above
    Fingerprint fingerprint


ctypedef struct Arriving:       # a header that a probe has found
    Handle request              # of its receive
    MpiHeader header
    char data[WITH_HEADER_BYTES]


ctypedef struct MpiRequest:           # what MPI is transferring: a message, or a collective
    MpiRequest *next
    MpiRequest *prev
    Request *request            # that ends with it; NULL: no thread waits for it
    uint64_t comm_id
    int peer                    # of the link; -1: all
    bint borrows                # MPI uses memory other than `data`
    bint lingers                # that memory is in use and no thread waits for it
    char *data                  # freed with it
    int count                   # requests that MPI has accepted
    int done
    int error                   # MPI's code of a failed request
    int later                   # Postponed: not started yet; `header` then describes it
    MpiHeader header
    Handle handles[1]           # of those requests; allocated longer


ctypedef struct Mpi:
    ForeignTransport foreign                 # must be the first member
    Net *net
    Handle comm
    Handle byte                 # MPI_BYTE
    int any_source              # MPI_ANY_SOURCE
    size_t piece_bytes          # largest transfer of one MPI call
    Arriving *arriving          # HEADERS of them
    int first, headers          # the oldest that is in use, and how many are
    bint ended                  # no further header comes
    unsigned int polls          # how often MPI was polled
    MpiRequest requests               # the head of the ring of pending requests
    size_t lingering            # pending requests whose memory no thread waits for
    int64_t *left_at            # time of each peer's departure notice; 0: none
    int left                    # number of departed peers
    int error                   # the last error that MPI reported
    int *under                  # the tag of the last payload to each peer
    int largest_tag             # MPI_TAG_UB
    int callers                 # Callers
    pthread_t one               # the thread that made the link


ctypedef struct FingerprintExchange:    # the exchange of a fingerprint with a neighbour
    Request request
    Fingerprint fingerprint     # this rank's, for comparison


ctypedef struct FingerprintExchanges:   # Comm.own: for src/algorithms/mpi/mpi_collectives.pyx
    FingerprintExchange of[2]   # of the last two calls, alternating
    unsigned int calls


cdef inline Mpi *mpi_of(const Net *net) noexcept nogil:
    return <Mpi *>net.foreign


cdef inline size_t pieces(const Mpi *mpi, size_t nbytes) noexcept nogil:
    return (nbytes + mpi.piece_bytes - 1) // mpi.piece_bytes


cdef inline int piece(const Mpi *mpi, size_t nbytes, size_t i) noexcept nogil:
    cdef size_t rest = nbytes - i * mpi.piece_bytes
    return <int>(rest if rest < mpi.piece_bytes else mpi.piece_bytes)


# Return where MPI's next request goes.
cdef inline Handle *next_of(MpiRequest *mpi_request) noexcept nogil:
    return &mpi_request.handles[mpi_request.count]


# Count a request that MPI accepted (code SUCCESS); return MPI's code.
cdef inline int added(MpiRequest *mpi_request, int code) noexcept nogil:
    mpi_request.count += code == SUCCESS
    return code


# Initialize the functions of a ForeignTransport, with nothing under way.
cdef void init_mpi(Mpi *mpi) noexcept nogil
# Return whether this thread may call MPI.
cdef bint may_call(const Net *net) noexcept nogil
# Add one with room for `room` of MPI's requests to the ring; NULL: no memory.
cdef MpiRequest *new_mpi_request(Mpi *mpi, Request *r, uint64_t comm_id, int peer,
                                 int room) noexcept nogil
# MPI refused the next request with this code. Requests it accepted go on; their memory stays.
cdef int on_error(Mpi *mpi, MpiRequest *mpi_request, int code) noexcept nogil
# Make progress without blocking; return whether there was any.
cdef bint progress(Net *net) noexcept nogil
# Send a small message together with its header, or a header alone. OK: it is complete; PENDING:
# its request will report completion.
cdef int send_whole(Mpi *mpi, Request *r, int peer, const MpiHeader *header) noexcept nogil
# A group is gone: end what it has under way.
cdef void drop_mpi_requests(Mpi *mpi, uint64_t comm_id) noexcept nogil
