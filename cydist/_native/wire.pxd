"""The frames two ranks exchange: over a socket or, where ranks share memory, through rings.

A message of at most `most_eager` bytes is one frame, header and bytes. The receiver keeps it until
a receive asks for it. A larger one is announced first (RTS, no bytes). The receiver answers (CTS)
once a receive has matched. Then the bytes follow in frames of CHUNK_BYTES (DATA), directly from the
sender's memory into the receiver's. Where the ranks share memory, both copy them together instead
(stream_coop_copy.pxd), and the receiver answers again when all are there. So no unexpected message
ever blocks a connection, and the kept bytes are bounded: a sender has at most `held_limit` bytes
under way to one peer in frames that were not handed to receives. Beyond that it announces messages.
"""
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from cydist._native.abi cimport Fingerprint


cdef enum:
    MAGIC = 0x05645943          # "CYd", version 5; reads differently in another byte order


cdef enum FrameKind:            # the order is part of the wire format
    EAGER = 1                   # a whole message
    RTS = 2                     # a message of nbytes waits, at `other` if not 0; id: its name
    CTS = 3                     # id: as in the RTS; flags: an Answer; other: receiver's name
    DATA = 4                    # the next bytes; other: the receiver's name
    WITHDRAW = 5                # id: as in the RTS; the rest will not be sent
    CREDIT = 6                  # carries `released` and nothing else
    GOODBYE = 7                 # the sender leaves on purpose
    FAREWELL = 8                # it has left the group whose comm id is in `id`


cdef enum Answer:
    SEND = 0
    REFUSED = 1                 # the receive ended in a mismatch: the send is complete
    GONE = 2                    # the receiver's group was destroyed: the send is lost
    JOIN = 3                    # the receiver takes it; the sender may help
    TAKEN = 4                   # the receiver has it: the send is complete


ctypedef struct Header:         # of every frame; 104 bytes in the byte order of both hosts
    uint32_t magic              # identifies version and byte order
    uint8_t kind
    uint8_t lane
    uint16_t flags
    uint64_t comm_id
    uint64_t tag
    uint64_t nbytes             # bytes that follow; of an RTS: of the message
    uint64_t id
    uint64_t other              # of a control message over a socket: the tag of its bytes
    uint64_t released           # eager bytes of this connection handed to receives so far
    Fingerprint fingerprint
    uint64_t auth               # over a socket: the tag of all this; see stream_auth.pxd
