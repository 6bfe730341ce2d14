"""Long messages between two ranks of a host that both of them copy: the receiver takes pieces
from the front out of the sender's memory, the sender puts pieces from the back into the
receiver's, until they meet. So both cores work, and nothing is copied twice. A sender that is
busy elsewhere is not waited for: the receiver takes all.

A ring has one such message at a time, which the receiver opens, in the ring's Control:

1. open     the receiver says where the message goes, then puts its name and no claims into
            `claims`, and answers the offer
2. claim    whoever takes the next piece raises its count in `claims`, by compare and swap; so no
            piece is taken twice, none after the end, and none of another message
3. pushed   the sender says how many of its pieces are written
4. close    the receiver, when all pieces are there; or whoever gives up

Who closes first decides: what the receiver has taken counts only if the sender had not closed by
then, for its memory may have changed since. A sender that gives up may not have heard that its
message is open, nor the receiver, whose ring is full, that it is taken back. So the sender counts
in `withdrawn`, before its memory is its caller's again, and a receiver that has heard of fewer
closes nothing until it has heard of all. A receiver that gives up waits until the piece that the
sender is writing is written, but not for long. A sender that gives up need not wait.

Where the system does not let one process reach into the other, or the memory is a device's, the
message goes through the ring after all, and so do all later ones between the two.
"""
from libc.stdint cimport uint64_t

from cydist._native.stream cimport Connection, Out


cdef enum:
    JOINT_BYTES = 65536         # shorter messages take no longer through the ring


cdef enum Progress:
    IDLE = 0                    # the other side must do something first
    MOVED = 1
    WHOLE = 2                   # the message is there
    FAILED = 3                  # memory could not be reached

# For the receiver.

# Can an offered message that lies at `theirs` be copied so?
cdef bint can_join(const Connection *c, uint64_t theirs, size_t nbytes) noexcept nogil
# Open the next one: so many bytes from `theirs` to `into`.
cdef void open_joint(Connection *c, uint64_t name, uint64_t theirs, char *into,
                     size_t nbytes) noexcept nogil
cdef int take_some(Connection *c) noexcept nogil
# Give up. On return the sender writes no more; False: it was stopped in the middle of a piece,
# which it may write when it goes on.
cdef bint stop_taking(Connection *c) noexcept nogil

# For the sender.

# The receiver has opened the message that was offered by `out`.
cdef void join(Connection *c, Out *out, uint64_t name) noexcept nogil
cdef int give_some(Connection *c) noexcept nogil
cdef void stop_giving(Connection *c) noexcept nogil
# A frame that takes a message back will follow: its memory may change when this returns.
cdef void take_back(Connection *c) noexcept nogil

# Has either side something to do?
cdef bint joint_waits(const Connection *c) noexcept nogil
