"""The steps of algorithms that go through windows: who may write and read what, when.

Every rank takes part in every step of every call, in the same order:

1. claim    wait until all ranks have consumed step s - heads: its head may be written again;
            and step s - slots, if the data are long, as all ranks know
2. publish  write data and fingerprint, and what we have consumed, then raise `posted` to s + 1
3. read     wait for a peer's `posted`, compare its fingerprint with ours, read its data
4. consumed once every peer's fingerprint of the step is compared and our reading is done

A rank that reads not everybody (a broadcast's root) does not wait for step 4: it returns, and
compares some steps later, or when it has to hear everybody, so that a peer in another call is
noticed there. What a rank has consumed it says with every step it publishes, so the flag is
raised only now and then, and before its owner waits for others. No rank is more than `heads` steps
ahead of what all have consumed, so the rank that is farthest behind can always go on.

A rank whose wait takes long looks at everybody's fingerprints, so a mismatch between any two
ranks ends the call on all of them. Heads lie in the same places whatever follows them, so ranks
that disagree about where the data are find that there.
"""
from libc.stdint cimport uint64_t

from cydist._native.abi cimport (
    Call, Fingerprint, Reduction, TINY_BYTES, Comm, Windows, head_of,
)


cdef enum:
    FEW_RANKS = 64              # so many need no malloc


# Where the long data of a step lie.
cdef inline char *slot_of(Comm *t, int rank, uint64_t step) noexcept nogil:
    cdef const Windows *w = t.windows
    return w.of[rank].slots + (step & <uint64_t>(w.slots - 1)) * w.slot_stride


# Where the data of a step lie that are so many bytes in all.
cdef inline char *place_of(Comm *t, int rank, uint64_t step, size_t nbytes) noexcept nogil:
    if nbytes <= TINY_BYTES:
        return <char *>(head_of(t.windows, rank, step) + 1) - TINY_BYTES
    if nbytes <= t.windows.short_bytes:
        return <char *>(head_of(t.windows, rank, step) + 1)
    return slot_of(t, rank, step)


cdef inline const Fingerprint *call_of(Comm *t, int rank, uint64_t step) noexcept nogil:
    return &head_of(t.windows, rank, step).call


# Is a contribution what was given? Then a rank reads its own there, and not in its window, whose
# lines others read at the same time: that makes them slow.
cdef inline bint as_given(const Reduction *op) noexcept nogil:
    return op.prepare == NULL


# Wait until all ranks are done with what lies where this step's data go: so many bytes at the most,
# the same on all ranks.
cdef int claim(Comm *t, Call *c, uint64_t step, size_t nbytes) noexcept nogil
# So many bytes are written: show them, and the call's fingerprint.
cdef void publish(Comm *t, Call *c, uint64_t step, size_t nbytes) noexcept nogil
# Wait until a peer's slot of this step can be read; MISMATCH if it is in another call.
cdef int hear(Comm *t, Call *c, int peer, uint64_t step) noexcept nogil
cdef int hear_all(Comm *t, Call *c, uint64_t step) noexcept nogil
# We heard everybody in this step, and have read it.
cdef int heard(Comm *t, Call *c, uint64_t step) noexcept nogil
# Having read all steps before `steps`: compare what nobody compared, then say so. Not
# patient: only as far as all ranks have come.
cdef int consume(Comm *t, Call *c, uint64_t steps, bint patient) noexcept nogil
# Bytes of a slot for each of `parts`, whole elements of `unit` bytes; 0 if not even one fits.
cdef size_t part_bytes(Comm *t, Call *c, size_t parts, size_t unit) noexcept nogil
