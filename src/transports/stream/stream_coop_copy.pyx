"""Cooperative copies by sender and receiver; see stream_coop_copy.pxd."""
from libc.errno cimport ESRCH, errno
from libc.stdint cimport int64_t, uint64_t

from cydist._native.abi cimport PAGE, now_ns
from cydist._native.failpoints cimport RECV_MID, SEND_MID, reach
from cydist._native.linux cimport iovec, process_vm_readv, process_vm_writev
from cydist._native.shm_peers cimport LocalPeers, has_ended, ring_doorbell
from cydist._native.shm_ring cimport Control
from cydist._native.stream cimport CoopCopy
from cydist._native.sync cimport (
    GRACE_NS, fence, load_int, load_u64, sched_yield, store_int, store_u64, swap_u64,
    compare_swap_u64,
)

cdef enum:
    LEAST_PIECE = 32768
    MOST_PIECE = 262144
    BYTES_AT_ONCE = 1048576     # copied before other connections are served again

# `claims`: the receiver's count, the sender's, whether it is closed, and the message's name.
cdef enum:
    COUNT_BITS = 16
    MOST_PIECES = 65535

cdef uint64_t BACK = 1ULL << COUNT_BITS
cdef uint64_t CLOSED = 1ULL << (2 * COUNT_BITS)
cdef int NAME_SHIFT = 2 * COUNT_BITS + 1


cdef inline uint64_t front_of(uint64_t claims) noexcept nogil:
    return claims & MOST_PIECES


cdef inline uint64_t back_of(uint64_t claims) noexcept nogil:
    return (claims >> COUNT_BITS) & MOST_PIECES


cdef inline bint is_open(uint64_t claims, uint64_t name) noexcept nogil:
    return claims >> NAME_SHIFT == name and claims & CLOSED == 0


cdef inline uint64_t name_of(uint64_t name) noexcept nogil:
    return name & ((1ULL << (64 - NAME_SHIFT)) - 1)


cdef void set_message(CoopCopy *j, uint64_t name, char *ours, uint64_t theirs,
                      size_t nbytes) noexcept nogil:
    """Describe a message and its pieces; both sides cut it alike."""
    cdef size_t piece = max(<size_t>LEAST_PIECE, min(<size_t>MOST_PIECE, nbytes // 4))
    piece = max(piece, nbytes // MOST_PIECES + 1)
    j.piece = (piece + PAGE - 1) // PAGE * PAGE
    j.pieces = (nbytes - 1) // j.piece + 1
    j.name = name_of(name)
    j.ours = ours
    j.theirs = theirs
    j.nbytes = nbytes
    j.pushed = 0
    j.rung = j.lost = False


cdef uint64_t claim(Control *control, const CoopCopy *j, uint64_t one) noexcept nogil:
    """Return the number of a piece to copy, counted from this side's end; j.pieces: none."""
    cdef uint64_t claims = load_u64(&control.claims)
    while is_open(claims, j.name) and front_of(claims) + back_of(claims) < j.pieces:
        if compare_swap_u64(&control.claims, &claims, claims + one):
            return front_of(claims) if one == 1 else back_of(claims)
    return j.pieces


cdef bint close_claims(Control *control, const CoopCopy *j, uint64_t *claims) noexcept nogil:
    """Close the claims; False: they were closed before. `claims` gets their value at that time."""
    claims[0] = load_u64(&control.claims)
    while is_open(claims[0], j.name):
        if compare_swap_u64(&control.claims, claims, claims[0] | CLOSED):
            return True
    return False


cdef int copy_piece(Connection *c, const CoopCopy *j, uint64_t index, bint writing) noexcept nogil:
    cdef LocalPeers *n = c.net.shm
    cdef int pid = n.pids[n.place[c.peer]]
    cdef size_t start = index * j.piece
    cdef iovec here = iovec(j.ours + start, min(j.piece, j.nbytes - start))
    cdef iovec there = iovec(<char *>j.theirs + start, here.iov_len)
    cdef ssize_t done
    while here.iov_len != 0:
        if writing:
            done = process_vm_writev(pid, &here, 1, &there, 1, 0)
        else:
            done = process_vm_readv(pid, &here, 1, &there, 1, 0)
        if done <= 0:
            # Other code notices that the process has ended.
            return IDLE if done < 0 and errno == ESRCH else FAILED
        here = iovec(<char *>here.iov_base + done, here.iov_len - done)
        there = iovec(<char *>there.iov_base + done, here.iov_len)
    return MOVED


# Receiving

cdef bint can_coop_copy(const Connection *c, uint64_t theirs, size_t nbytes) noexcept nogil:
    return (c.local and c.inbound.control != NULL and c.coop_recv.pieces == 0 and not c.no_coop_copy
            and theirs != 0 and nbytes >= COOP_BYTES
            and load_int(&c.inbound.control.failed) == 0)


cdef void open_coop_copy(Connection *c, uint64_t name, uint64_t theirs, char *into,
                         size_t nbytes) noexcept nogil:
    cdef Control *control = c.inbound.control
    set_message(&c.coop_recv, name, into, theirs, nbytes)
    store_u64(&control.into, <uint64_t>into)
    store_u64(&control.pushed, 0)
    swap_u64(&control.claims, c.coop_recv.name << NAME_SHIFT)


cdef inline bint knows_withdrawals(const Connection *c) noexcept nogil:
    return load_u64(&c.inbound.control.withdrawn) == c.withdrawals


cdef int pull_pieces(Connection *c) noexcept nogil:
    cdef Control *control = c.inbound.control
    cdef CoopCopy *j = &c.coop_recv
    cdef uint64_t index, claims
    cdef size_t done = 0
    cdef int how
    while done < BYTES_AT_ONCE:
        if load_int(&control.failed) != 0:
            return FAILED
        index = claim(control, j, 1)
        if index == j.pieces:
            break
        reach(RECV_MID)
        how = copy_piece(c, j, index, False)
        if how != MOVED:
            j.lost = True
            return how
        done += j.piece
    if done != 0:
        return MOVED
    claims = load_u64(&control.claims)
    if (j.lost or not is_open(claims, j.name)
            or load_u64(&control.pushed) != back_of(claims)):
        return IDLE
    fence()                     # all was copied before `withdrawn` is read
    if not knows_withdrawals(c) or not close_claims(control, j, &claims):
        return IDLE             # the sender has given up: it reports so
    j.pieces = 0
    return WHOLE


cdef bint stop_pulling(Connection *c) noexcept nogil:
    cdef Control *control = c.inbound.control
    cdef LocalPeers *n = c.net.shm
    cdef int64_t until = now_ns() + GRACE_NS
    cdef uint64_t claims
    close_claims(control, &c.coop_recv, &claims)
    c.coop_recv.pieces = 0
    # If many ranks share a core, one yield may take long.
    while load_u64(&control.pushed) != back_of(claims) and load_int(&control.failed) == 0:
        if has_ended(n, n.place[c.peer]):
            break
        if now_ns() >= until:
            c.no_coop_copy = True
            return False
        sched_yield()
    return True


# Sending

cdef void join_coop_copy(Connection *c, Outgoing *out, uint64_t name) noexcept nogil:
    cdef Control *control = c.outbound.control
    if load_int(&control.failed) != 0 or not is_open(load_u64(&control.claims), name_of(name)):
        return                  # it cannot be copied, or the receiver has taken all pieces
    set_message(&c.coop_send, name, <char *>out.data, load_u64(&control.into), out.left)
    c.coop_out = out


cdef int push_pieces(Connection *c) noexcept nogil:
    cdef Control *control = c.outbound.control
    cdef CoopCopy *j = &c.coop_send
    cdef uint64_t index
    cdef size_t done = 0
    while done < BYTES_AT_ONCE and not j.rung:
        index = claim(control, j, BACK)
        if index == j.pieces:
            j.rung = True       # the receiver may sleep until the last piece is there
            ring_doorbell(c.net.shm, c.net.shm.place[c.peer])
            break
        reach(SEND_MID)
        if not is_open(load_u64(&control.claims), j.name):
            j.rung = True       # this rank was stopped, and the receiver has given up
            j.pushed += 1       # the receiver waits for this piece
            store_u64(&control.pushed, j.pushed)
            break
        if copy_piece(c, j, j.pieces - 1 - index, True) != MOVED:
            j.rung = True
            store_int(&control.failed, 1)
            ring_doorbell(c.net.shm, c.net.shm.place[c.peer])
            break
        j.pushed += 1
        store_u64(&control.pushed, j.pushed)
        done += j.piece
    return MOVED if done != 0 else IDLE


cdef void stop_pushing(Connection *c) noexcept nogil:
    cdef uint64_t claims
    close_claims(c.outbound.control, &c.coop_send, &claims)
    c.coop_out = NULL


cdef void withdraw_coop_copy(Connection *c) noexcept nogil:
    cdef Control *control = c.outbound.control
    if c.local and control != NULL:
        store_u64(&control.withdrawn, control.withdrawn + 1)
        fence()


cdef bint coop_copy_waits(const Connection *c) noexcept nogil:
    cdef uint64_t claims
    cdef const CoopCopy *j = &c.coop_recv
    if c.coop_out != NULL and not c.coop_send.rung:
        return True
    if j.pieces == 0 or j.lost:
        return False
    claims = load_u64(&c.inbound.control.claims)
    if not is_open(claims, j.name):
        return False
    return (front_of(claims) + back_of(claims) < j.pieces
            or load_int(&c.inbound.control.failed) != 0
            or (load_u64(&c.inbound.control.pushed) == back_of(claims) and knows_withdrawals(c)))
