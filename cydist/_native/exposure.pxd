"""Exposure: arrays that the other ranks may access during a call.

In step 1 of a call every rank publishes where its blocks are. The other ranks may access them from
then until step 2, which is the end of the call.

Some processes may not access each other's memory, and some memory, such as a device's, cannot be
accessed at all. The first call of a group tries it, and every rank checks its own blocks. When one
rank says no, all ranks run the call's fallback instead; so they do for PREMUL_SUM, whose factors
differ.

With "adaptive", one rank also says no when the fallback is the faster way. How fast a core reads
what another has written depends on where the host places them, and may change from one second to
the next; so does writing what another has read. That rank measures both ways, from its entry into
the calls to their end: eight calls in a row, or two and more that take 2 ms. It tries the slower
way again after 32 times as long, or 10 s. If the fallback is faster, and all ranks know the call's
length, it says so for the next 32 calls of that length, and they take no step to agree. These are
the calls that it measures then: where ranks share cores they are far shorter than after a step in
which all ranks must get their turn. The bits are the same.

A failing rank must not return arrays while other ranks access them: they would read data that it
did not give, or overwrite what it does next. So it revokes access and waits for accesses that have
begun. A rank announces its access before it checks for revocation. It copies a small piece at a
time, and checks again before it uses what it read.
"""
from libc.stdint cimport int64_t, uint64_t

from cydist._native.abi cimport Block, Call, Comm
from cydist._native.window_protocol cimport slot_of


ctypedef struct Access:         # a call while its memory is exposed
    uint64_t step               # whose slots say where all ranks' blocks are
    int scratch                 # this many slots after them are free for pulled data
    int64_t next_check          # when to check next whether the call must end


# The work that a call does during exposure.
ctypedef int (*Body)(Comm *t, Call *c, Access *a) noexcept nogil
# The work that a call does without the other ranks, while they finish. For long blocks it runs
# first, because the others may arrive late; it then runs again if the fallback runs the call.
ctypedef void (*LocalWork)(Comm *t, Call *c) noexcept nogil


cdef inline const Block *published_blocks(Comm *t, int peer, const Access *a) noexcept nogil:
    return <const Block *>slot_of(t, peer, a.step)


# Return into how many parts a free slot is cut, so that every peer has one.
cdef inline size_t parts_of(Comm *t, int slots) noexcept nogil:
    return max(1, (t.size + slots - 2) // slots)


# Expose these blocks, run the body, and return when all ranks are done; or run the call's fallback.
# `local_work` may be NULL.
cdef int run_exposed(Comm *t, Call *c, const Block *first, int firsts, const Block *second,
                     int seconds, LocalWork local_work, Body body) noexcept nogil

cdef enum:
    ACCESS_BYTES = 1048576      # moved between two looks at the clock
    MAPPED_ACCESS_BYTES = 16777216  # where it is mapped here: long copies bypass the cache

# Return where such memory of a peer is mapped here, or NULL.
cdef inline char *mapped_address(Comm *t, int peer, char *theirs, size_t nbytes) noexcept nogil:
    return t.windows.mapped(t, peer, theirs, nbytes) if t.windows.mapped != NULL else NULL

# For bodies that work on peers' arrays in place: call these before and after every ACCESS_BYTES.
cdef int begin_access_to_all(Comm *t, Call *c, Access *a) noexcept nogil
cdef int end_access_to_all(Comm *t, Call *c, Access *a) noexcept nogil
# Return OK, or why the call must end. Call this now and then.
cdef int check_call(Comm *t, Call *c, Access *a, int peer) noexcept nogil
# For bodies: copy from a peer's memory, or into it.
cdef int pull(Comm *t, Call *c, Access *a, int peer, Block into, char *theirs) noexcept nogil
cdef int push(Comm *t, Call *c, Access *a, int peer, char *theirs,
              Block source) noexcept nogil
# Find where a peer's contribution can be read: in place, during an access, or pulled into `into`.
cdef int fetch(Comm *t, Call *c, Access *a, int peer, Block into, char *theirs,
               const void **source) noexcept nogil
# Return MISMATCH if a peer gives or takes another number of bytes than this rank.
cdef int check_size(Comm *t, Call *c, const Access *a, int peer, size_t theirs,
                    size_t ours) noexcept nogil
