"""Recursive doubling, and recursive halving and doubling: log2 p rounds of exchanges in pairs.

    all_reduce "doubling"           rounds log2 p       bytes sent per rank n log2 p
    all_reduce "halving_doubling"   rounds 2 log2 p     bytes sent per rank 2 n (p-1)/p

If p is no power of two, the excess ranks first fold into a neighbour and get the result from it: 2
more rounds, and n more bytes each way. "doubling" is best for short messages, "halving_doubling"
for long ones on a power of two.

In round k partners differ in bit k, so they hold the sums of neighbouring ranges of ranks. Both
combine the lower range with the higher. So both get the same bits, and reductions need not
commute. "halving_doubling" halves the vector in every round (each partner keeps one half), then
retraces its steps: every element is completed by one rank, then copied. Partial sums travel in the
array's dtype: 16- and 8-bit floats round once per round.

Three ranks with contributions a, b and c:

    rank 0  a -> 1                                  <- 1  abc
    rank 1  ab         ab <-> c with rank 2         abc
    rank 2  c          ab <-> c with rank 1         abc
            fold       round 0                      unfold

Source: R. Rabenseifner, "Optimization of collective reduction operations", ICCS 2004; R. Thakur,
R. Rabenseifner and W. Gropp, Int. J. High Perform. Comput. Appl. 19 (2005).
"""
from libc.stdlib cimport malloc

from cydist._native.abi cimport (
    ALL_REDUCE, NO_MEMORY, OK, RANK_BITS, Block, Call, Comm, Reduction,
)
from cydist._native.algorithm_table cimport implement
from cydist._native.pipeline cimport (
    PIPE_DEPTH, Pipe, block_of, combine, conclude, contribute, exchange, release_buffer, pipe_close,
    pipe_open, pipe_post, pipe_take, segment_of, segment_size, segments_in,
)


cdef enum:
    SHORT = 1024                # messages of at most this size need no malloc


ctypedef struct Fold:           # the largest power of two of ranks, and the excess ranks
    int power                   # ranks that take part
    int extra                   # ranks 0, 2, .. 2 extra - 2 fold into 1, 3, .. 2 extra - 1
    int place                   # of this rank among those that take part; -1: folded away
    int partner                 # rank to fold with; -1: none


cdef void find_fold(Comm *t, Fold *fold) noexcept nogil:
    fold.power = 1
    while fold.power <= t.size // 2:
        fold.power *= 2
    fold.extra = t.size - fold.power
    fold.place = t.rank - fold.extra
    fold.partner = -1
    if t.rank < 2 * fold.extra:
        fold.place = t.rank // 2 if t.rank % 2 == 1 else -1
        fold.partner = t.rank + 1 if t.rank % 2 == 0 else t.rank - 1


cdef inline int rank_of(const Fold *fold, int place) noexcept nogil:
    return 2 * place + 1 if place < fold.extra else place + fold.extra


cdef int doubling(Comm *t, Call *c) noexcept nogil:
    cdef const Reduction *op = c.op
    cdef Block own = c.inputs[0], result = c.outputs[0]
    cdef char on_stack[SHORT]
    cdef char *theirs = on_stack
    cdef Fold fold
    cdef int status
    if result.nbytes > SHORT:
        theirs = <char *>malloc(result.nbytes)
        if theirs == NULL:
            return NO_MEMORY
    find_fold(t, &fold)
    contribute(op, result.ptr, own.ptr, own.nbytes)
    status = fold_in(t, c, &fold, result, theirs)
    if status == OK and fold.place >= 0:
        status = double_up(t, c, &fold, result, theirs)
    if status == OK:
        status = fold_out(t, c, &fold, result)
    if theirs != on_stack:
        release_buffer(t, theirs)
    return status


# Steps of "doubling": 0 to fold, 1 + k for round k, RANK_BITS + 1 to unfold.
cdef int fold_in(Comm *t, Call *c, const Fold *fold, Block acc, char *theirs) noexcept nogil:
    cdef int status
    if fold.partner < 0:
        return OK
    if fold.place < 0:
        return exchange(t, c, 0, acc.ptr, acc.nbytes, fold.partner, NULL, 0, -1)
    status = exchange(t, c, 0, NULL, 0, -1, theirs, acc.nbytes, fold.partner)
    if status == OK:
        combine(c.op, acc.ptr, theirs, acc.ptr, acc.nbytes)
    return status


cdef int double_up(Comm *t, Call *c, const Fold *fold, Block acc,
                   char *theirs) noexcept nogil:
    cdef int bit = 1, step = 1, partner, status
    while bit < fold.power:
        partner = rank_of(fold, fold.place ^ bit)
        status = exchange(t, c, step, acc.ptr, acc.nbytes, partner, theirs, acc.nbytes, partner)
        if status != OK:
            return status
        if partner < t.rank:
            combine(c.op, acc.ptr, theirs, acc.ptr, acc.nbytes)
        else:
            combine(c.op, acc.ptr, acc.ptr, theirs, acc.nbytes)
        bit *= 2
        step += 1
    conclude(c.op, acc.ptr, acc.nbytes)
    return OK


cdef int fold_out(Comm *t, Call *c, const Fold *fold, Block result) noexcept nogil:
    if fold.partner < 0:
        return OK
    if fold.place >= 0:
        return exchange(t, c, RANK_BITS + 1, result.ptr, result.nbytes, fold.partner, NULL, 0, -1)
    return exchange(t, c, RANK_BITS + 1, NULL, 0, -1, result.ptr, result.nbytes, fold.partner)


ctypedef struct Walk:           # the state of halving_doubling between rounds
    Fold fold
    size_t segment              # bytes
    size_t per_round            # steps reserved for each round
    char *arriving              # PIPE_DEPTH segments


cdef int halving_doubling(Comm *t, Call *c) noexcept nogil:
    cdef const Reduction *op = c.op
    cdef Block own = c.inputs[0], result = c.outputs[0]
    cdef Walk walk
    cdef int status
    find_fold(t, &walk.fold)
    walk.segment = segment_size(c, op.itemsize, result.nbytes, 2 * RANK_BITS + 2)
    walk.per_round = segments_in(result.nbytes, walk.segment)
    walk.arriving = <char *>malloc(PIPE_DEPTH * walk.segment)
    if walk.arriving == NULL:
        return NO_MEMORY
    if op.prepare != NULL or t.size == 1:
        contribute(op, result.ptr, own.ptr, own.nbytes)
        own = result
    if walk.fold.place < 0:
        status = trade(t, c, &walk, 0, walk.fold.partner, &own, NULL, NULL)
        if status == OK:
            status = trade(t, c, &walk, 2 * RANK_BITS + 1, walk.fold.partner, NULL, &result, NULL)
    else:
        status = halve_then_double(t, c, &walk, own, result)
    release_buffer(t, walk.arriving)
    return status


cdef int halve_then_double(Comm *t, Call *c, const Walk *walk, Block own,
                           Block result) noexcept nogil:
    """Run "halving_doubling" on the ranks that are not folded away."""
    cdef const Fold *fold = &walk.fold
    cdef size_t unit = c.op.itemsize
    cdef Block kept[RANK_BITS]
    cdef Block given[RANK_BITS]
    cdef Block range_ = result, out
    cdef const char *mine = own.ptr     # until a contribution was combined into the result
    cdef int k = 0, side, status = OK
    if fold.partner >= 0:
        status = trade(t, c, walk, 0, fold.partner, NULL, &result, mine)
        mine = result.ptr
    while status == OK and (1 << k) < fold.power:
        side = (fold.place >> k) & 1
        kept[k] = block_of(range_, side, 2, unit)
        given[k] = block_of(range_, 1 - side, 2, unit)
        out = given[k]
        out.ptr = <char *>mine + (given[k].ptr - result.ptr)
        status = trade(t, c, walk, 1 + k, rank_of(fold, fold.place ^ (1 << k)), &out, &kept[k],
                       mine + (kept[k].ptr - result.ptr))
        range_ = kept[k]
        mine = result.ptr
        k += 1
    if status == OK:
        conclude(c.op, range_.ptr, range_.nbytes)
    while status == OK and k > 0:
        k -= 1
        status = trade(t, c, walk, RANK_BITS + 1 + k, rank_of(fold, fold.place ^ (1 << k)),
                       &kept[k], &given[k], NULL)
    if status == OK and fold.partner >= 0:
        status = trade(t, c, walk, 2 * RANK_BITS + 1, fold.partner, &result, NULL, NULL)
    return status


cdef int trade(Comm *t, Call *c, const Walk *walk, int round_, int partner,
               const Block *out, const Block *into, const char *own) noexcept nogil:
    """Send `out` and receive `into` in segments; add `own` to what arrives unless it is NULL."""
    cdef size_t sends = segments_in(out.nbytes, walk.segment) if out != NULL else 0
    cdef size_t receives = segments_in(into.nbytes, walk.segment) if into != NULL else 0
    cdef size_t total = sends if sends > receives else receives
    cdef size_t i, taken
    cdef Block sent, received
    cdef char *theirs
    cdef Pipe pipe
    pipe_open(&pipe, c, total)
    pipe.first_step = <size_t>round_ * walk.per_round
    for i in range(total + pipe.depth - 1):
        if i < sends:
            sent = segment_of(out[0], i, walk.segment)
        if i < receives:
            received = segment_of(into[0], i, walk.segment)
            if own != NULL:
                received.ptr = walk.arriving + i % pipe.depth * walk.segment
        if i < total and pipe_post(t, c, &pipe, i, sent, partner if i < sends else -1,
                                   received, partner if i < receives else -1) != OK:
            break
        if i + 1 < pipe.depth:
            continue
        taken = i + 1 - pipe.depth
        if pipe_take(t, c, &pipe, taken) != OK:
            break
        if own != NULL and taken < receives:
            received = segment_of(into[0], taken, walk.segment)
            theirs = walk.arriving + taken % pipe.depth * walk.segment
            if partner < t.rank:
                combine(c.op, received.ptr, theirs, own + taken * walk.segment, received.nbytes)
            else:
                combine(c.op, received.ptr, own + taken * walk.segment, theirs, received.nbytes)
    return pipe_close(t, c, &pipe)


implement(b"doubling", ALL_REDUCE, doubling)
implement(b"halving_doubling", ALL_REDUCE, halving_doubling)
