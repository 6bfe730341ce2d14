"""Finding the memory of what users pass."""
from cydist._native.array cimport Array


# The memory of an array of any library, or of a buffer: never a copy. TypeError or
# ValueError, with a message that says what would be accepted, when it cannot be used.
cpdef Array asarray(object obj)
