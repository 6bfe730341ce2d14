"""TLS 1.3 on one connection, by the libssl that this process has loaded for Python's `ssl`.

Both sides hold a key that the handshake of cydist/net/auth.py made for this connection, and no
certificates: an external PSK with an ephemeral Diffie-Hellman exchange (RFC 8446, psk_dhe_ke). So
the job's secret, when it is learnt later, does not open what was sent before.

libssl reads and writes memory here. A connection of the stream transport seals what is to be sent
into `outbox` and sends it from there, so a socket that takes only a part never asks libssl for the
same bytes twice. What is sealed and not sent yet is sent before anything else.
"""
from libc.stddef cimport size_t
from libc.stdint cimport uint64_t


cdef enum TlsEnd:               # results of tls_read and tls_write beside a count
    TLS_ENDED = -1              # the connection has ended
    TLS_CHANGED = -2            # a record is not the next one that the peer sent


ctypedef struct Tls:
    void *ssl
    int fd                      # the socket; -1: `arrived` in its place
    const char *arrived         # bytes that were handed in, and how many
    size_t arrived_bytes
    int reads                   # of the socket, before other connections have their turn
    bint ended                  # the peer has closed the connection, or it broke
    int error                   # errno with which it broke, or 0
    char *outbox                # sealed bytes, of which [sent, filled) are to be sent
    size_t sent
    size_t filled
    size_t room
    bint withheld               # the caller does not know yet that its last byte was sealed
    uint64_t records            # sealed with the current key
    unsigned char key[32]       # zero after the handshake


# Seal as much of `first`, then `second`, as is sent at once, and send it. Return how many bytes
# were taken; the caller offers the rest again. The last byte counts only when all is in the
# socket, so what was offered is complete when it has been sent.
cdef ssize_t tls_write(Tls *t, const char *first, size_t first_bytes, const char *second,
                       size_t second_bytes) noexcept nogil
# Say that the socket may have more. Then tls_read must be called until it returns 0: what libssl
# holds by then no poll of the socket reports.
cdef void tls_readable(Tls *t) noexcept nogil
# Open the next bytes into `into`; return how many, or 0: no more for now.
cdef ssize_t tls_read(Tls *t, char *into, size_t room) noexcept nogil
cdef void tls_free(Tls *t) noexcept nogil


cdef class TlsSession:
    cdef Tls *tls
    cdef readonly bint done
    cdef Tls *owned(self) except NULL
    cdef bytes take_outbox(self)
    # Hand the session to a link, which reads and writes this socket by itself.
    cdef Tls *detach(self, int fd) noexcept
