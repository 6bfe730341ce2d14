"""Cooperative copy: both ranks copy a long message between two processes of one host.

The receiver takes pieces from the front out of the sender's memory. The sender puts pieces from the
back into the receiver's, until they meet. So both cores work, and no byte is copied twice. The
receiver does not wait for a sender that is busy elsewhere: it then takes all pieces.

A ring has one such message at a time. The receiver opens it in the ring's Control:

1. open     the receiver says where the message goes, then puts its name and no claims into
            `claims`, and answers the RTS
2. claim    to take its next piece, a rank raises its count in `claims` by compare and swap; so no
            piece is taken twice, none after the end, and none of another message
3. pushed   the sender says how many of its pieces are written
4. close    the receiver, when all pieces are there; or the rank that gives up

The first rank to close decides. The receiver's copies count only if the sender had not closed
before, because the sender's memory may have changed since. A sender that gives up may not know that
its message is open. The receiver may not know that it is taken back, because its ring is full. So
the sender counts in `withdrawn` before it returns the memory to its caller. A receiver that knows
of fewer withdrawals closes nothing until it knows of all. A receiver that gives up waits briefly
for the piece that the sender is writing. A sender that gives up need not wait.

If the system does not let one process access the other, or the memory is a device's, the message
goes through the ring. So do all later messages between the two.
"""
from libc.stdint cimport uint64_t

from cydist._native.stream cimport Connection, Outgoing


cdef enum:
    COOP_BYTES = 65536          # shorter messages take no longer through the ring


cdef enum CoopProgress:
    IDLE = 0                    # the other side must do something first
    MOVED = 1
    WHOLE = 2                   # the message is there
    FAILED = 3                  # memory could not be reached

# Receiver.

# Return whether an announced message at `theirs` can be copied this way.
cdef bint can_coop_copy(const Connection *c, uint64_t theirs, size_t nbytes) noexcept nogil
# Open the next message: `nbytes` from `theirs` to `into`.
cdef void open_coop_copy(Connection *c, uint64_t name, uint64_t theirs, char *into,
                         size_t nbytes) noexcept nogil
cdef int pull_pieces(Connection *c) noexcept nogil
# Give up. After this returns the sender writes no more. False: it was stopped in the middle of a
# piece, which it may write when it continues.
cdef bint stop_pulling(Connection *c) noexcept nogil

# Sender.

# The receiver has opened the message that `out` announced.
cdef void join_coop_copy(Connection *c, Outgoing *out, uint64_t name) noexcept nogil
cdef int push_pieces(Connection *c) noexcept nogil
cdef void stop_pushing(Connection *c) noexcept nogil
# Call this before the frame that takes a message back. Its memory may change after this returns.
cdef void withdraw_coop_copy(Connection *c) noexcept nogil

# Return whether either side has work to do.
cdef bint coop_copy_waits(const Connection *c) noexcept nogil
