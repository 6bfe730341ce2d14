"""Messages between processes; see src/transports/stream/stream_link.pyx."""
from cydist._native.abi cimport Link
from cydist._native.shm_peers cimport LocalPeersHandle
from cydist._native.stream cimport Net


cdef class MessageLink(Link):
    cdef Net *net
    cdef LocalPeersHandle peers_handle            # the ranks with which it has rings
