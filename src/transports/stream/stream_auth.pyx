"""Tags of frames; see stream_auth.pxd."""
from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint64_t

from cydist._native.abi cimport CONTROL_TAG
from cydist._native.stream cimport Connection, FrameKeys
from cydist._native.wire cimport EAGER, RTS, Header

# The reference implementation, compiled into this module so that it can be inlined.
cdef extern from "vendor/siphash/siphash.c" nogil:
    int siphash(const void *data, size_t nbytes, const void *key, uint8_t *out, size_t out_bytes)


cdef struct Numbered:           # what a header's tag covers
    uint64_t number
    Header header               # but for its tag, which is last


cdef inline uint64_t tag_of(const uint8_t *key, const void *data, size_t nbytes) noexcept nogil:
    cdef uint64_t tag
    siphash(data, nbytes, key, <uint8_t *>&tag, sizeof(tag))
    return tag


cdef inline uint64_t header_tag(const FrameKeys *keys, const Header *h) noexcept nogil:
    cdef Numbered numbered
    numbered.number = keys.number
    numbered.header = h[0]
    return tag_of(keys.header, &numbered, sizeof(Numbered) - sizeof(uint64_t))


cdef void seal_header(Connection *c, Header *h) noexcept nogil:
    h.auth = header_tag(&c.sending, h)


cdef void seal_payload(Connection *c, Header *h, const char *data, size_t nbytes) noexcept nogil:
    if h.tag == CONTROL_TAG and (h.kind == EAGER or h.kind == RTS):
        h.other = tag_of(c.sending.payload, data, nbytes)


cdef bint header_is_authentic(Connection *c) noexcept nogil:
    if header_tag(&c.receiving, &c.header) != c.header.auth:
        return False
    c.receiving.number += 1
    return True


cdef bint payload_is_authentic(const Connection *c, uint64_t tag, const char *data,
                               size_t nbytes) noexcept nogil:
    return tag_of(c.receiving.payload, data, nbytes) == tag
