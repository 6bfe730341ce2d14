"""The steps of algorithms that use windows: which rank may write and read what, when.

Every rank takes part in every step of every call, in the same order:

1. claim    wait until all ranks have consumed step s - heads: its head may be written again;
            and step s - slots, if the data are long, as all ranks know
2. publish  write data, fingerprint and this rank's consumed steps, then raise `posted` to s + 1
3. read     wait for a peer's `posted`, compare its fingerprint with this rank's, read its data
4. consumed once every peer's fingerprint of the step is compared and this rank's reading is done

A rank that does not read all peers (a broadcast's root) does not wait for step 4: it returns. It
compares some steps later, or when it must read all peers, and notices a peer in another call then.
A rank says with every step it publishes what it has consumed. So it raises the flag only now and
then, and before it waits for others. No rank is more than `heads` steps ahead of what all have
consumed, so the rank that is farthest behind can always proceed.

A rank whose wait takes long looks at all fingerprints, so a mismatch between any two ranks ends the
call on all of them. Heads are in the same places whatever follows them. So ranks that disagree
about where the data are find that in the heads.
"""
from libc.stdint cimport uint64_t

from cydist._native.abi cimport (
    Call, Fingerprint, Reduction, TINY_BYTES, Comm, Windows, head_of,
)


cdef enum:
    FEW_RANKS = 64              # up to this many ranks need no malloc


# Return a slot of a rank's window.
cdef inline char *slot_in(const Windows *w, uint64_t rank, uint64_t step) noexcept nogil:
    return w.of[rank].slots + (step & <uint64_t>(w.slots - 1)) * w.slot_stride


# Return where a rank writes the long data of a step. Of two ranks, each writes with every other
# turn of the slots into the other's window: memory that it was the last to read, which takes a
# fraction of the time; see shm_ring.pxd. Of more ranks each keeps to its own window: one that is in
# another call must not overwrite what a root gives to the others.
cdef inline char *slot_of(Comm *t, int rank, uint64_t step) noexcept nogil:
    cdef uint64_t turn = step // <uint64_t>t.windows.slots
    return slot_in(t.windows, <uint64_t>rank ^ (turn & <uint64_t>(t.size == 2)), step)


# Return where the data of a step with `nbytes` bytes in all are. A call with a root moves data one
# way: then a rank writes into its own window, which stays in its cache.
cdef inline char *place_of(Comm *t, const Call *c, int rank, uint64_t step,
                           size_t nbytes) noexcept nogil:
    if nbytes <= TINY_BYTES:
        return <char *>(head_of(t.windows, rank, step) + 1) - TINY_BYTES
    if nbytes <= t.windows.short_bytes:
        return <char *>(head_of(t.windows, rank, step) + 1)
    return slot_of(t, rank, step) if c.root < 0 else slot_in(t.windows, rank, step)


cdef inline const Fingerprint *call_of(Comm *t, int rank, uint64_t step) noexcept nogil:
    return &head_of(t.windows, rank, step).call


# Return whether a contribution is used as given. Then a rank reads its own from the caller's array
# and not from its window, whose lines other ranks read at the same time, which is slow.
cdef inline bint as_given(const Reduction *op) noexcept nogil:
    return op.prepare == NULL


# Wait until all ranks are done with the data in the place of this step's: `nbytes` at most, the
# same on all ranks.
cdef int acquire_slot(Comm *t, Call *c, uint64_t step, size_t nbytes) noexcept nogil
# Publish the `nbytes` bytes that are written, with the call's fingerprint.
cdef void publish(Comm *t, Call *c, uint64_t step, size_t nbytes) noexcept nogil
# Wait until a peer's slot of this step can be read; MISMATCH if it is in another call.
cdef int wait_for_peer(Comm *t, Call *c, int peer, uint64_t step) noexcept nogil
cdef int wait_for_all(Comm *t, Call *c, uint64_t step) noexcept nogil
# Mark the step as consumed: this rank has read and compared all peers' data of it.
cdef int mark_consumed(Comm *t, Call *c, uint64_t step) noexcept nogil
# This rank has read all steps before `steps`: compare the fingerprints not compared yet, then say
# so. Not `patient`: only as far as all ranks have come.
cdef int consume(Comm *t, Call *c, uint64_t steps, bint patient) noexcept nogil
# Return the bytes of a slot for each of `parts`, a multiple of `unit`; 0 if one unit does not fit.
cdef size_t part_bytes(Comm *t, Call *c, size_t parts, size_t unit) noexcept nogil
