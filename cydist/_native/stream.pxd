"""Connections that carry the frames of wire.pxd, and the state of one rank's end of all of them.

A Net with a ForeignTransport has no sockets: a rank that shares no memory with this one is reached
by a library, whose messages are matched in the same queues.

The lock of the Net is held around every call here; no call blocks.
"""
from libc.stdint cimport int64_t, uint8_t, uint64_t

from cydist._native.abi cimport Request, Comm
from cydist._native.linux cimport pthread_cond_t, pthread_mutex_t, pthread_t
from cydist._native.matching cimport Item, Queues
from cydist._native.shm_peers cimport LocalPeers
from cydist._native.shm_ring cimport Ring
from cydist._native.wire cimport Header


cdef enum:
    # The largest message that does not wait for its receiver; of those that ranks of a host can
    # copy together it is the one below JOINT_BYTES.
    EAGER_BYTES = 65536
    CHUNK_BYTES = 1048576       # of a DATA frame; others get their turn in between
    STAGING_BYTES = 65536       # read at once where no receive says where bytes belong


ctypedef struct Out:            # a frame to write, and the send that it belongs to
    Out *next
    Out *prev
    Request *request            # NULL: nobody waits for it
    const char *data            # what is to be written next, within the message
    char *owned                 # freed with the frame
    size_t left                 # bytes of the message that are not written
    size_t frame_left           # of them in this frame
    size_t header_sent
    bint withdrawn              # the rest of the message is not wanted any more
    Header header


cdef enum Stage:                # of an Item of this transport
    POSTED                      # a receive in its queue
    ARRIVING                    # a kept message, some bytes still to come
    ARRIVED                     # a kept message
    OFFERED                     # an offer that no receive has matched
    FILLING                     # an eager message on its way into a receive, or to nobody
    PULLING                     # an answered offer; in its connection's list
    BEYOND                      # a message of the Far's, whole or announced


ctypedef struct Incoming:       # Item.more
    int stage
    Connection *connection      # where the bytes come from
    uint64_t id                 # the sender's name
    uint64_t name               # ours
    uint64_t theirs             # where an offered message lies, or 0
    size_t got
    size_t charged              # eager bytes to release


cdef enum State:                # of a Connection
    UNUSED                      # nobody has asked for it
    WANTED                      # asked for, not there
    LIVE
    ENDED


ctypedef struct CoopCopy:          # this rank's side of a message that both ranks copy
    uint64_t name
    char *ours
    uint64_t theirs
    size_t nbytes
    size_t piece
    uint64_t pieces             # 0: there is none
    uint64_t pushed             # of the sender: pieces written
    bint rung                   # of the sender: there is nothing left to do
    bint lost                   # of the receiver: a piece was claimed that nobody will copy


ctypedef struct Connection:     # one lane to one peer
    Net *net
    int peer
    int lane
    int state
    int fd                      # the socket; -1: through rings
    bint near                   # the bytes go through rings
    Ring inbound                # made at the first write of either side
    Ring outbound
    int over                    # a Loss: how it ends when all that came through them is read
    Connection *next_near
    bint armed                  # epoll tells when there is room to write
    bint broken                 # nothing more can be written
    bint said_goodbye           # the peer did
    Out *out                    # to be written, oldest first (a ring; NULL: empty)
    Out *offers                 # offered, not answered (a ring)
    Item *pulling               # answered, not complete (a ring)
    CoopCopy taking                # see stream_coop_copy.pxd
    Item *taken                 # the receive in `pulling` that it is for
    CoopCopy giving
    Out *given                  # the send in `offers` that it is for; NULL: there is none
    bint apart                  # ranks that cannot copy together
    uint64_t withdrawals        # messages taken back, of which we know
    uint64_t sent               # eager bytes sent; less `credited`: what the peer may hold
    uint64_t credited
    uint64_t received           # eager bytes that came; less `released`: what we hold
    uint64_t released
    uint64_t reported
    Connection *next_wanted
    # Reading: a header, then `to_read` bytes into `sink` (NULL: to nobody).
    Header header
    size_t header_read
    size_t to_read
    char *sink
    Item *filling               # whose bytes they are; NULL: nobody's


ctypedef struct Net


# A library that carries messages; its requests have it as `place`.
ctypedef struct ForeignTransport:
    bint needed                 # some rank is reached by it: it must be asked to move things
    bint (*progress)(Net *net) noexcept nogil           # was there anything to do?
    # May this thread ask it to? One that may not sleeps until another has.
    bint (*allowed)(const Net *net) noexcept nogil
    int (*send)(Net *net, const Comm *t, Request *r) noexcept nogil    # as post_send
    # Give a message, out of its queue, to a receive that it fits, or not.
    void (*take)(Net *net, Item *item, Request *r, int fit) noexcept nogil
    void (*refuse)(Net *net, Item *item) noexcept nogil     # nobody will take it
    void (*withdraw)(Net *net, Request *r) noexcept nogil   # may let go of the lock meanwhile
    # End a request whose other side left a while ago.
    void (*give_up)(Net *net, Request *r) noexcept nogil
    void (*leave)(Net *net) noexcept nogil


ctypedef struct Net:            # one rank's end of all its connections
    Net *next                   # of this process's; see stream_fork.pyx
    pthread_mutex_t lock
    pthread_cond_t changed      # a request completed, or the poller left
    int sleepers                # threads that wait for `changed`
    bint polling                # one caller sleeps in epoll_wait
    int waiters                 # threads inside wait()
    const Request *waited_for   # what the last wait has not seen the end of; see nap()
    int64_t idle_since          # when something moved before it
    unsigned int tests          # of requests, so far
    int pid                     # that made this; a forked child must not touch it
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
    LocalPeers *nearby              # NULL: no memory is shared
    Connection *near            # all that are near, ended ones as well
    ForeignTransport *far                    # NULL: ranks that are not near are reached by sockets
    Queues queues
    uint64_t names              # given out so far
    bint lingering              # a peer may still write, once, where a receive was given up
    size_t moving               # requests of point to point, and frames that nobody waits for
    bint closed
    char *staging
    # The background thread; see stream_progress.pyx.
    pthread_t background
    pthread_cond_t resume
    bint background_runs
    bint background_polls
    bint background_joinable
    bint stopping
    int live                    # sockets, for statistics
    int made


cdef enum Loss:                 # the order is known to the other side of a ring
    DIED = 1
    LEFT = 2
    BABBLED = 3                 # it sent what no rank sends


cdef inline Incoming *incoming(const Item *item) noexcept nogil:
    return <Incoming *>item.more
