"""What a forked child lets go of: its copies of the parent's descriptors."""
from cydist._native.stream cimport Net


# From now on a child of this process, however it was forked, begins by abandoning `net`.
cdef void remember(Net *net) noexcept nogil
cdef void forget(Net *net) noexcept nogil
# In a forked child: close our copies of the parent's descriptors, and nothing else.
cdef void abandon(Net *net) noexcept nogil
# Of the link itself: no connection is left, and nobody polls.
cdef void close_descriptors(Net *net) noexcept nogil
