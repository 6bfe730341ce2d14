"""Arrays that are open to the other ranks for a call, which read and write in them.

In step 1 of a call every rank shows where its blocks lie; from then until step 2, which is the
end of the call, the others may reach them.

Not everybody may reach into another process, and not all memory can be reached: of a device, say.
The first call of a group tries it, every rank looks at its own blocks, and when one says no, all
take "flat" or "staged" instead. So they do for PREMUL_SUM, whose factors differ.

Where "adaptive" was chosen, one rank says no, too, when windows are the faster way: how fast a core
reads what another has written, and writes what another has read, depends on where the host puts
them, and may change from one second to the next. It takes the time of both ways, from when all
have come, and tries the slower one again after 32 times as long as that takes. The bits are the
same.

A rank that fails must not hand back arrays that others are in: they would read what it did not
give, or write over what it does next. It bars them, and waits for who has begun: a visitor says so
before it looks at the bar, does little at a time, and looks again before it believes what it read.
"""
from libc.stdint cimport int64_t, uint64_t

from cydist._native.abi cimport Block, Call, Comm
from cydist._native.window_protocol cimport slot_of


ctypedef struct Access:         # a call while its memory is open
    uint64_t step               # whose slots say where everybody's blocks lie
    int scratch                 # so many slots behind them are free for what is pulled
    int64_t look                # when to look next whether the call must end


# What a call does meanwhile.
ctypedef int (*Body)(Comm *t, Call *c, Access *a) noexcept nogil
# What it does without them, while they end what they do; with long blocks it begins with that, for
# the others may come late, and does it again where the call goes through windows then.
ctypedef void (*Alone)(Comm *t, Call *c) noexcept nogil


cdef inline const Block *shown(Comm *t, int peer, const Access *a) noexcept nogil:
    return <const Block *>slot_of(t, peer, a.step)


# Into how many parts a free slot is cut, so that there is one for every peer.
cdef inline size_t parts_of(Comm *t, int slots) noexcept nogil:
    return max(1, (t.size + slots - 2) // slots)


# Show these blocks, run the body, and leave when all have; or run the call through windows. Alone
# may be NULL.
cdef int run(Comm *t, Call *c, const Block *first, int firsts, const Block *second,
             int seconds, Alone alone, Body body) noexcept nogil

cdef enum:
    VISIT_BYTES = 1048576       # moved between two looks at the clock
    LONG_VISIT_BYTES = 16777216     # so much where it lies here: long copies bypass the cache

# Where such memory of a peer lies here, or NULL.
cdef inline char *within(Comm *t, int peer, char *theirs, size_t nbytes) noexcept nogil:
    return t.windows.mapped(t, peer, theirs, nbytes) if t.windows.mapped != NULL else NULL

# For bodies that work on arrays of peers where they lie here: before and after every VISIT_BYTES.
cdef int begin_visits(Comm *t, Call *c, Access *a) noexcept nogil
cdef int end_visits(Comm *t, Call *c, Access *a) noexcept nogil
# Every now and then: must the call end?
cdef int look(Comm *t, Call *c, Access *a, int peer) noexcept nogil
# For bodies: copy from a peer's memory, or into it.
cdef int pull(Comm *t, Call *c, Access *a, int peer, Block into, char *theirs) noexcept nogil
cdef int push(Comm *t, Call *c, Access *a, int peer, char *theirs,
              Block source) noexcept nogil
# Where a contribution of a peer can be read: there, in a visit, or in `into`, pulled already.
cdef int fetch(Comm *t, Call *c, Access *a, int peer, Block into, char *theirs,
               const void **source) noexcept nogil
# MISMATCH, if a peer gives or takes another number of bytes than we do.
cdef int differ(Comm *t, Call *c, const Access *a, int peer, size_t theirs,
                size_t ours) noexcept nogil
