"""Rings: how bytes get from one rank of a host to another through memory that they share.

Two ranks have a ring each way. The writer alone moves its tail, the reader alone its head; both
only go up, and what lies between them is to be read. Neither believes the other: a tail or head
that cannot be is an end of the connection, never a place in memory.
"""
from libc.stdint cimport uint32_t, uint64_t

from cydist._native.shm_peers cimport LocalPeers


cdef enum:
    NO_RINGS = 1                # in a pair's word: there was no memory for them


ctypedef struct Control:        # of a ring, before its data; lines in pairs, for each side
    uint64_t tail               # bytes written so far
    int over                    # a Loss: the writer has ended, and this is how
    char pad_writer[116]
    uint64_t head               # bytes read so far
    uint32_t wants_room         # the writer waits until there is more
    char pad_reader[116]
    # Of the message that both copy, see stream_coop_copy.pxd:
    uint64_t claims             # by either side
    uint64_t into               # where the reader wants it
    char pad_claims[112]
    uint64_t pushed             # pieces that the writer of the ring has written there
    uint64_t withdrawn          # how many messages that it had begun to send it takes back
    int failed                  # it could not write; for good
    char pad_pushed[108]


ctypedef struct Ring:           # one end; all zero: there is none
    Control *control
    char *data
    uint64_t at                 # bytes that this end has written, or read
    uint64_t seen               # where the other end was at the last look


# The word of a pair of places.
cdef uint64_t *pair_word(const LocalPeers *n, int place) noexcept nogil
# Take rings for this rank and that at `place`, unless somebody has. The word afterwards.
cdef uint64_t make_rings(LocalPeers *n, int place) noexcept nogil
# Find both ends of this rank in a word of make_rings; False: it makes no sense.
cdef bint find_rings(LocalPeers *n, int place, uint64_t word, Ring *inbound,
                     Ring *outbound) noexcept nogil

# Write what there is room for, of a header and of what follows it; how many bytes, or -1: the
# reader's head cannot be.
cdef ssize_t write_ring(LocalPeers *n, int place, Ring *ring, const char *header,
                        size_t header_bytes, const char *data, size_t nbytes) noexcept nogil
# The next bytes to read, at most PORTION in one piece; NULL and 0: none; NULL and 1: the writer's
# tail cannot be.
cdef const char *unread(LocalPeers *n, Ring *ring, size_t *nbytes) noexcept nogil
# They are read.
cdef void was_read(LocalPeers *n, int place, Ring *ring, size_t nbytes) noexcept nogil
# Is there room for a PORTION? True as well where the head cannot be: the next write tells.
cdef bint has_room(LocalPeers *n, Ring *ring) noexcept nogil
# Is there room for so much? As above.
cdef bint has_room_for(LocalPeers *n, Ring *ring, size_t nbytes) noexcept nogil
# There is no room for more: let the reader tell. False: there is room after all.
cdef bint want_room(LocalPeers *n, Ring *ring) noexcept nogil
cdef void say_over(LocalPeers *n, int place, Ring *ring, int how) noexcept nogil
