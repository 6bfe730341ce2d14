"""Whether a group takes calls."""


cdef class GroupState:              # the body describes the fields
    cdef readonly int pid
    cdef public object error
    cdef public bint destroyed
    cpdef bint is_usable(self) noexcept

# Where the id of this process is, which a fork changes: the system call costs more than all other
# checks of a fast call.
cdef const int *process_id() noexcept
