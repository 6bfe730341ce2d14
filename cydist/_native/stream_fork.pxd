"""Release, in a forked child, its copies of the parent's descriptors."""
from cydist._native.stream cimport Net


# From now on every forked child of this process first abandons `net`.
cdef void register_net(Net *net) noexcept nogil
cdef void unregister_net(Net *net) noexcept nogil
# In a forked child: close its copies of the parent's descriptors, and nothing else.
cdef void abandon_net(Net *net) noexcept nogil
# For the link itself: no connection is left, and no thread polls.
cdef void close_descriptors(Net *net) noexcept nogil
