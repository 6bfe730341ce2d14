"""What other hierarchical algorithms do by leaders where a host has one rank."""

from cydist._native.abi cimport Call, Comm


cdef int broadcast(Comm *t, Call *c) noexcept nogil
cdef int reduce(Comm *t, Call *c) noexcept nogil
