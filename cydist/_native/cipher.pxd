"""Sealed records: what an encrypted connection carries after the handshake of TLS 1.3.

    length 4 | ciphertext | tag 16

AES-128-GCM seals each record. The length, that of the ciphertext, comes with its highest byte first
and is authenticated as additional data. The nonce is the connection's IV xor the number of the
record (RFC 8446, 5.3), so a record that was dropped, repeated, reordered, reflected or changed does
not open. A record may be four times as long as one of TLS, and is sealed from the caller's memory
and opened into it: libssl copies both.

Each direction has a secret of its own from TLS's exporter, and the key and IV come from it as
RFC 8446 (7.3) derives them. Both sides count what a key has sealed and change it after the same
record (7.2), so no message says so. No record ends a direction: the frames or requests inside say
when a peer is done, and without that its end is a lost connection.
"""
from libc.stddef cimport size_t
from libc.stdint cimport uint64_t


cdef enum:
    SECRET_BYTES = 32


cdef enum CipherEnd:            # results beside a count
    CIPHER_ENDED = -1           # the connection has ended
    CIPHER_CHANGED = -2         # a record is not the next one that the peer sent
    CIPHER_NO_MEMORY = -3


ctypedef struct Direction:
    void *context               # EVP_CIPHER_CTX with the current key
    unsigned char secret[SECRET_BYTES]
    unsigned char iv[12]
    uint64_t number             # of the next record that this key seals
    uint64_t blocks             # that this key has sealed
    bint failed                 # a record was not sealed or opened: none is any more


ctypedef struct CipherBuffers:  # what the connections of a link share
    char *incoming              # where each reads to
    char *spare                 # which the next takes to seal into


ctypedef struct Cipher:         # of one connection
    Direction sending
    Direction receiving
    uint64_t blocks_per_key
    int forks                   # of processes, when this was made
    # On a link, whose lock is held around every call:
    int fd
    int error                   # errno with which the connection broke, or 0
    CipherBuffers *buffers
    const char *arrived         # sealed bytes that were read and are not opened
    size_t arrived_bytes
    char *rest                  # the beginning of a record, between two reads
    char *outbox                # sealed bytes, of which [sent, filled) are to be sent, or NULL
    size_t sent
    size_t filled
    bint withheld               # the caller does not know yet that its last byte was sealed


# Seal as much of `first`, then `second`, as is sent at once, and send it. Return how many bytes
# were taken; the caller offers the rest again. The last byte counts only when all is in the
# socket, so what was offered is complete when it has been sent.
cdef ssize_t cipher_write(Cipher *c, const char *first, size_t first_bytes, const char *second,
                          size_t second_bytes) noexcept nogil
# Read once from the socket. Return whether it may have more, or CIPHER_ENDED or CIPHER_NO_MEMORY.
# Then call cipher_open until it returns 0.
cdef int cipher_read(Cipher *c) noexcept nogil
# Open the next record, if all of it was read; return how many bytes it carries, and 0 if there is
# none. They are in `into` if they fit into its room, and else where `plain` says until the next
# call.
cdef ssize_t cipher_open(Cipher *c, char *into, size_t room, const char **plain) noexcept nogil
# Release what connections share.
cdef void free_buffers(CipherBuffers *buffers) noexcept nogil
cdef void cipher_free(Cipher *c) noexcept nogil


cdef class CipherHandle:
    cdef Cipher *cipher
    cdef bytes rest             # of the bytes given to `open`
    cdef begin(self, const unsigned char *sending, const unsigned char *receiving)
    cdef Cipher *owned(self) except NULL
    # Hand the cipher to a link, which reads and writes this socket by itself.
    cdef Cipher *detach(self, int fd, CipherBuffers *buffers) noexcept
