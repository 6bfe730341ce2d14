"""The steps of algorithms that go through windows: who may write and read what, when.

Every rank takes part in every step of every call, in the same order:

1. claim    wait until all ranks have consumed step s - slots: its slot may be written again
2. publish  write data and fingerprint, and what we have consumed, then raise `posted` to s + 1
3. read     wait for a peer's `posted`, compare its fingerprint with ours, read its data
4. consumed once every peer's fingerprint of the step is compared and our reading is done

A rank that reads not everybody (a broadcast's root) does not wait for step 4: it returns, and
compares a few steps later, or when it has to hear everybody, so that a peer in another call is
noticed there. What a rank has consumed it says with every step it publishes, so the flag is
raised only now and then, and before its owner waits for others. No rank is more than `slots` steps
ahead of what all have consumed, so the rank that is farthest behind can always go on.

A rank whose wait takes long looks at everybody's fingerprints, so a mismatch between any two
ranks ends the call on all of them.
"""
from libc.stdint cimport uint64_t

from cydist._native.abi cimport Call, Fingerprint, Reduction, TINY_BYTES, Transport, head_of


cdef inline char *data_of(Transport *t, int rank, uint64_t step) noexcept nogil:
    return <char *>(head_of(t.windows, rank, step) + 1)


# Where the data of a step lie that are so few bytes in all.
cdef inline char *place_of(Transport *t, int rank, uint64_t step, size_t nbytes) noexcept nogil:
    return data_of(t, rank, step) - (TINY_BYTES if nbytes <= TINY_BYTES else 0)


cdef inline const Fingerprint *call_of(Transport *t, int rank, uint64_t step) noexcept nogil:
    return &head_of(t.windows, rank, step).call


# Is a contribution what was given? Then a rank reads its own there, and not in its window, whose
# lines others read at the same time: that makes them slow.
cdef inline bint as_given(const Reduction *op) noexcept nogil:
    return op.prepare == NULL


# Wait until all ranks are done with what this step's slot holds.
cdef int claim(Transport *t, Call *c, uint64_t step) noexcept nogil
# Our slot is written: show it, and the call's fingerprint.
cdef void publish(Transport *t, Call *c, uint64_t step, size_t nbytes) noexcept nogil
# Wait until a peer's slot of this step can be read; MISMATCH if it is in another call.
cdef int hear(Transport *t, Call *c, int peer, uint64_t step) noexcept nogil
cdef int hear_all(Transport *t, Call *c, uint64_t step) noexcept nogil
# We heard everybody in this step, and have read it.
cdef int heard(Transport *t, Call *c, uint64_t step) noexcept nogil
# Having read all steps before `steps`: compare what nobody compared, then say so. Not
# patient: only as far as all ranks have come.
cdef int consume(Transport *t, Call *c, uint64_t steps, bint patient) noexcept nogil
# Bytes of a slot for each of `parts`, whole elements of `unit` bytes; 0 if not even one fits.
cdef size_t part_bytes(Transport *t, Call *c, size_t parts, size_t unit) noexcept nogil
