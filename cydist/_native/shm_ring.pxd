"""Rings: byte streams between ranks of one host through shared memory.

Two ranks have a ring in each direction. Only the writer moves its tail, and only the reader moves
its head. Both only grow, and the bytes between them are unread. Neither side trusts the other: an
impossible tail or head ends the connection and is never used as a place in memory.

Behind the data of each ring lies a cell, which holds one whole message. At first a ring's writer
owns it. The header of a message, in the ring, says that it lies in a cell, and the receiver owns
that cell once it has read it. Behind the header, a byte in the ring stands for each further PORTION
that the sender has written into the cell: the receiver copies one while the sender writes the next.
So a rank that answers writes into the memory that it has just read. A core
takes 1.4 ns for a cache line that it was the last to read, and 7 to 30 ns for one that another core
has read since (measured on Zen 4).
"""
from libc.stdint cimport uint32_t, uint64_t

from cydist._native.shm_memory cimport PORTION
from cydist._native.shm_peers cimport LocalPeers


cdef enum Cell:                 # in the header of a message, and in a set of cells
    OUTBOUND_CELL = 1           # behind the ring into which its sender writes
    INBOUND_CELL = 2            # behind the other ring of the two ranks


cdef enum:
    LEAST_CELL_BYTES = 1024     # a shorter message takes no longer through the ring
    MOST_MARKS = 32             # of a message, see marks_of
    NO_RINGS = 1                # in a pair's word: there was no memory for rings


ctypedef struct Control:        # of a ring, before its data; each side has its own pairs of lines
    uint64_t tail               # bytes written so far
    int over                    # a Loss: how the writer ended
    char pad_writer[116]
    uint64_t head               # bytes read so far
    uint32_t wants_space        # the writer waits for room
    char pad_reader[116]
    # Of the message that both copy, see stream_coop_copy.pxd:
    uint64_t claims             # by either side
    uint64_t into               # where the reader wants the message
    char pad_claims[112]
    uint64_t pushed             # pieces that the writer of the ring has written there
    uint64_t withdrawn          # how many messages that it had begun to send it has taken back
    int failed                  # it could not write; permanent
    char pad_pushed[108]


ctypedef struct Ring:           # one end; all zero: none
    Control *control
    char *data
    uint64_t at                 # bytes that this end has written, or read
    uint64_t seen               # where the other end was at the last look


# Return where this rank sees the cell behind a ring.
cdef inline char *cell_behind(const LocalPeers *n, const Ring *ring) noexcept nogil:
    return ring.data + n.ring_bytes


# Return the word of this rank and the rank at `place`.
cdef uint64_t *pair_entry(const LocalPeers *n, int place) noexcept nogil
# Make rings for this rank and the one at `place`, unless they exist. Returns the word afterwards.
cdef uint64_t make_rings(LocalPeers *n, int place) noexcept nogil
# Find both ends of this rank from a word of make_rings; False: the word is invalid.
cdef bint find_rings(LocalPeers *n, int place, uint64_t word, Ring *inbound,
                     Ring *outbound) noexcept nogil

# Return how many bytes in the ring follow the header of a message in a cell.
cdef inline size_t marks_of(size_t nbytes) noexcept nogil:
    return 0 if nbytes == 0 else (nbytes - 1) // PORTION


# Write as much as there is room for of a header and the data after it. Returns how many bytes, or
# -1: the reader's head is impossible.
cdef ssize_t write_ring(LocalPeers *n, int place, Ring *ring, const char *header,
                        size_t header_bytes, const char *data, size_t nbytes) noexcept nogil
# Return the next bytes to read, at most PORTION in one piece. NULL and 0: none; NULL and 1: the
# writer's tail is impossible.
cdef const char *readable_bytes(LocalPeers *n, Ring *ring, size_t *nbytes) noexcept nogil
# Mark these bytes as read.
cdef void advance_read(LocalPeers *n, int place, Ring *ring, size_t nbytes) noexcept nogil
# Return whether a PORTION fits. True also if the head is impossible: the next write reports that.
cdef bint has_space(LocalPeers *n, Ring *ring) noexcept nogil
# Return whether `nbytes` fit. As above.
cdef bint has_space_for(LocalPeers *n, Ring *ring, size_t nbytes) noexcept nogil
# Ask the reader to notify this rank when there is room. False: there is room after all.
cdef bint request_space(LocalPeers *n, Ring *ring) noexcept nogil
cdef void close_writer(LocalPeers *n, int place, Ring *ring, int how) noexcept nogil
