"""Calls that other hierarchical algorithms leave to leaders where a host has one rank."""

from cydist._native.abi cimport Call, Comm


cdef int broadcast(Comm *t, Call *c) noexcept nogil
cdef int reduce(Comm *t, Call *c) noexcept nogil
cdef int reduce_scatter(Comm *t, Call *c) noexcept nogil
