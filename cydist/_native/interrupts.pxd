"""What a signal handler raised inside a wait; see src/engine/interrupts.pyx."""

# Has a handler raised, and has nobody taken its exception yet?
cdef bint handler_has_raised()
# That exception, which is no longer kept; None: there is none.
cdef object take_raised_by_handler()
