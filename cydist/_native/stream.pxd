"""Connections that carry the frames of wire.pxd, and one rank's state of all of them.

A Net with a ForeignTransport has no sockets: a library reaches the ranks that share no memory with
this one. Its messages are matched in the same queues.

The lock of the Net is held around every call here; no call blocks.
"""
from libc.stdint cimport int64_t, uint8_t, uint64_t

from cydist._native.abi cimport Request, Comm
from cydist._native.cipher cimport Cipher, CipherBuffers
from cydist._native.linux cimport pthread_cond_t, pthread_mutex_t, pthread_t
from cydist._native.matching cimport Item, Queues
from cydist._native.shm_peers cimport LocalPeers
from cydist._native.shm_ring cimport OUTBOUND_CELL, Ring, cell_behind
from cydist._native.stream_silence cimport Patience, Silence
from cydist._native.wire cimport Header


cdef enum:
    # The largest message that does not wait for its receiver. If two ranks of a host can copy
    # together, and the sender owns no cell for it, it is the largest below COOP_BYTES.
    EAGER_BYTES = 524288
    # The same over sockets, where waiting takes a round trip: the segments of long collectives.
    SOCKET_EAGER_BYTES = 262144
    CHUNK_BYTES = 1048576       # of a DATA frame; other frames can be sent in between
    STAGING_BYTES = 4096        # of one read when no receive says where the bytes belong


ctypedef struct Outgoing:       # a frame to write, and the send that it belongs to
    Outgoing *next
    Outgoing *prev
    Request *request            # NULL: no thread waits for it
    const char *data            # the next bytes to write, within the message
    char *owned                 # freed with the frame
    size_t left                 # bytes of the message that are not written yet
    size_t frame_left           # the part of `left` that is in this frame
    size_t header_sent
    bint withdrawn              # the rest of the message is no longer wanted
    Header header


cdef enum ItemStage:            # of an Item of this transport
    POSTED                      # a receive in its queue
    ARRIVING                    # a kept message, some bytes still to come
    ARRIVED                     # a kept message
    RTS_ARRIVED                 # an RTS that no receive has matched
    FILLING                     # an eager message on its way into a receive, or being discarded
    PULLING                     # an answered RTS; in its connection's list
    FOREIGN                     # a message of the foreign transport, whole or announced


ctypedef struct Incoming:       # what Item.more points to
    int stage
    Connection *connection      # where the bytes come from
    uint64_t id                 # the message's name on the sender
    uint64_t name               # the message's name on this rank
    uint64_t theirs             # where an announced message lies, or 0
    size_t got
    size_t charged              # eager bytes to release


cdef enum ConnectionState:      # of a Connection
    UNUSED                      # not requested yet
    WANTED                      # requested, not connected yet
    LIVE
    ENDED


ctypedef struct CoopCopy:          # this rank's side of a message that both ranks copy
    uint64_t name
    char *ours
    uint64_t theirs
    size_t nbytes
    size_t piece
    uint64_t pieces             # 0: there is none
    uint64_t pushed             # on the sender: pieces written
    bint rung                   # on the sender: nothing is left to do
    bint lost                   # on the receiver: a claimed piece will not be copied


ctypedef struct FrameKeys:      # of one direction; see stream_auth.pxd
    uint8_t header[16]
    uint8_t payload[16]
    uint64_t number             # of the next frame


ctypedef struct Connection:     # one lane to one peer
    Net *net
    int peer
    int lane
    int state
    int fd                      # the socket; -1: through rings
    Cipher *cipher              # of the socket; NULL: not encrypted
    FrameKeys sending           # of the socket; no key outlives it
    FrameKeys receiving
    bint forged                 # a frame is not the one that the peer sent
    Silence silence             # of the socket
    bint local                  # the bytes go through rings
    Ring inbound                # made at the first write of either side
    Ring outbound
    int cells                   # the cells that this rank owns: a set of Cell, as it names them
    int newest_cell             # the one that the last message in a cell came in
    int over                    # a Loss: how it ends once all bytes are read, or 0
    Connection *next_local
    bint armed                  # epoll tells when there is room to write
    bint broken                 # nothing can be written any more
    bint starved                # there was no memory for what it sent
    bint said_goodbye           # the peer has sent its departure notice
    Outgoing *out               # to be written, oldest first (a ring; NULL: empty)
    Outgoing *unanswered_rts    # announced, not answered (a ring)
    Item *pulling               # answered, not complete (a ring)
    CoopCopy coop_recv             # see stream_coop_copy.pxd
    Item *coop_item             # the receive in `pulling` that it is for
    CoopCopy coop_send
    Outgoing *coop_out          # the send in `unanswered_rts` that it is for; NULL: there is none
    bint no_coop_copy           # these ranks cannot copy together
    uint64_t withdrawals        # messages taken back, as far as this rank knows
    uint64_t sent               # eager bytes sent; minus `credited`: what the peer may hold
    uint64_t credited
    uint64_t received           # eager bytes received; minus `released`: what this rank holds
    uint64_t released
    uint64_t reported
    Connection *next_wanted
    # Reading: a header, then `to_read` bytes into `sink` (NULL: discarded).
    Header header
    size_t header_read
    size_t to_read
    char *sink
    const char *cell            # the rest of a message that lies in one; NULL: it does not. Then
    size_t in_cell              # these are its bytes, and `to_read` is the number of marks
    Item *filling               # the receive or message they belong to; NULL: none
    bint left_early             # they were left in the socket once: see `leaves_early`


ctypedef struct Net


# A library that carries messages; its requests point to this struct in `place`.
ctypedef struct ForeignTransport:
    bint needed                 # it reaches some rank, so it must be polled for progress
    bint (*progress)(Net *net) noexcept nogil           # return whether there was any
    # Return whether this thread may poll it. A thread that may not sleeps until another has.
    bint (*allowed)(const Net *net) noexcept nogil
    int (*send)(Net *net, const Comm *t, Request *r) noexcept nogil    # as post_send
    # Give a message, out of its queue, to a receive; `fit` says whether it fits.
    void (*take)(Net *net, Item *item, Request *r, int fit) noexcept nogil
    void (*refuse)(Net *net, Item *item) noexcept nogil     # no receive will take it
    void (*withdraw)(Net *net, Request *r) noexcept nogil   # may release the lock meanwhile
    # End a request to or from a peer that left a while ago.
    void (*give_up)(Net *net, Request *r) noexcept nogil
    void (*leave)(Net *net) noexcept nogil


ctypedef struct Net:            # one rank's end of all its connections
    Net *next                   # the process's next Net; see stream_fork.pyx
    pthread_mutex_t lock
    pthread_cond_t changed      # a request completed, or the poller left
    int sleepers                # threads that wait on `changed`
    bint polling                # one thread sleeps in epoll_wait
    int waiters                 # threads inside wait()
    const Request *waited_for   # the request of the last unfinished wait; see nap()
    int64_t idle_since          # when something made progress before it
    unsigned int tests          # calls to test so far
    bint glancing               # this poll only looks for control messages: see `leaves_early`
    uint64_t copied             # bytes of messages that came before their receive
    int pid                     # that made this; a forked child must not use it
    int rank
    int size
    int lanes
    int spins                   # looks at the sockets before a wait sleeps
    int most_spins
    size_t held_limit
    int epoll
    int wake                    # eventfd: ends an epoll_wait early
    int wanted_event            # eventfd: says that `wanted` is not empty
    Connection *wanted
    Connection **connections    # [peer * lanes + lane], NULL until used
    uint8_t *lost               # per peer: 0, or a Loss
    uint64_t *sent_to           # per peer: bytes that its sockets have taken
    int *hosts                  # per rank: the lowest rank of its host; NULL: not known
    Patience patience           # with silent hosts
    int64_t next_look           # for them
    LocalPeers *shm                 # NULL: no memory is shared
    Connection *local           # all local connections, including ended ones
    ForeignTransport *foreign                # NULL: sockets reach all ranks that are not local
    Queues queues
    uint64_t names              # message names assigned so far
    uint64_t finished           # requests so far
    bint lingering              # a peer may still write once into a withdrawn receive
    size_t in_flight            # point-to-point requests, and frames no thread waits for
    int in_calls                # requests of collectives
    bint closed
    char *staging
    CipherBuffers sealed        # of encrypted connections
    # The background thread; see stream_progress.pyx.
    pthread_t background
    pthread_cond_t resume
    bint background_runs
    bint background_polls
    bint background_joinable
    bint stopping
    int live                    # sockets, for statistics
    int made


cdef enum Loss:                 # these values are shared with the other side of a ring
    DIED = 1
    LEFT = 2
    BABBLED = 3                 # it sent invalid frames
    FORGED = 4                  # a third party sent frames, or changed them; only over sockets
    STARVED = 5                 # this rank had no memory for a message; never shared
    VANISHED = 6                # its host is silent; only over sockets


cdef inline size_t most_eager(const Connection *c) noexcept nogil:
    """Return the size of the largest message that does not wait for its receiver."""
    return EAGER_BYTES if c.local else SOCKET_EAGER_BYTES


cdef inline char *cell_at(const Connection *c, int cell) noexcept nogil:
    """Return where one of the two cells is, as this rank names it."""
    return cell_behind(c.net.shm, &c.outbound if cell == OUTBOUND_CELL else &c.inbound)


cdef inline Incoming *incoming(const Item *item) noexcept nogil:
    return <Incoming *>item.more
