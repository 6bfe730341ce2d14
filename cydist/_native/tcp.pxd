"""Messages between processes; see src/transports/tcp.pyx."""
from cydist._native.abi cimport Link
from cydist._native.memory cimport SharedMemory
from cydist._native.stream cimport Net


cdef class MessageLink(Link):
    cdef Net *net
    cdef SharedMemory memory                # in which the rings lie
