"""Windows in shared memory: their layout, and how flags are raised and awaited."""
from libc.stdint cimport int64_t, uint64_t

from cydist._native.abi cimport Comm, Windows


# Return the bytes of one rank's window: flags, heads and slots.
cdef size_t window_bytes(int slots, size_t slot_bytes) noexcept nogil
# Lay out the windows of `size` ranks, adjacent, from `memory` on. `cores`: on which these ranks may
# run, and those of other groups here.
cdef void lay_out(Windows *w, char *memory, int size, int slots, size_t slot_bytes,
                  int cores) noexcept nogil

# Set the flags in this memory, which is zero, to what they begin with.
cdef void begin_flags(char *memory, int size, int slots, size_t slot_bytes) noexcept nogil

# A comm's functions.
cdef void raise_flag(Comm *t, uint64_t *flag, uint64_t value) noexcept nogil
cdef int wait_flag(Comm *t, uint64_t *flag, uint64_t value,
                   int64_t deadline_ns) noexcept nogil
