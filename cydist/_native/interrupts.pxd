"""The exception that a signal handler raised inside a wait; see src/engine/interrupts.pyx."""

# Return whether a handler has raised an exception that was not taken yet.
cdef bint handler_has_raised()
# Return that exception and forget it; None: there is none.
cdef object take_raised_by_handler()
