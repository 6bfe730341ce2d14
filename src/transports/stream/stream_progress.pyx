"""Progress of messages: which thread moves them, and which sleep.

A waiting thread makes progress for all threads. One waiting thread (the poller) sleeps in
epoll_wait without the lock, the others on a condition variable. If point-to-point requests
are pending and no thread waits, a background thread polls instead. It steps aside as soon as
a thread waits, and ends when nothing has been pending for a while.
"""
from libc.stdint cimport int64_t, uint64_t
from posix.time cimport timespec

from cydist._native.abi cimport (
    ANY_SOURCE, INTERRUPTED, MISMATCH, OK, PENDING, Request, TIMEOUT, Comm, now_ns,
    slice_end,
)
from cydist._native.failpoints cimport WAIT, reach
from cydist._native.stream_recv cimport on_readable, advance_coop_copy
from cydist._native.stream_coop_copy cimport push_pieces, coop_copy_waits
from cydist._native.linux cimport (
    EPOLLOUT, SIG_SETMASK, epoll_event, epoll_wait, eventfd_read, eventfd_write,
    pthread_cond_broadcast, pthread_cond_t, pthread_cond_timedwait, pthread_create, pthread_join,
    pthread_mutex_lock, pthread_mutex_t, pthread_mutex_unlock, pthread_sigmask, sigfillset,
    sigset_t, usleep,
)
from cydist._native.matching cimport contradicted
from cydist._native.shm_peers cimport announce_sleep, drain_doorbell, end_sleep
from cydist._native.stream_send cimport on_writable
from cydist._native.stream_peers cimport (
    end_connection, close_local, look_for_silence, on_peer_events, has_unread, watch_peer,
)
from cydist._native.shm_ring cimport has_space, request_space
from cydist._native.stream cimport Connection, DIED, LIVE, Net
from cydist._native.sync cimport (
    SWITCH_NS, YIELD_NS, load_int, load_u32, pause, sched_yield, slice_until, spins_after,
    spins_after_short_sleep, spins_after_yield,
)


cdef enum:
    EVENTS = 32
    BACKGROUND_MS = 50          # the longest sleep of the background thread in epoll_wait
    NAP_NS = 1000000            # how soon it checks again whether a thread waits
    LOOKS_PER_DEATH = 1000
    MOST_POLLS = 100000         # of a wait that spins, before it reads the clock
    LOOKS_PER_FOREIGN = 4
    LOOKS_PER_YIELD = 20
    SHORT_NAP_US = 20
    LONG_NAP_US = 1000
    PATIENT_NS = 1000000000
    DOZE_NS = 10000000000       # idle time up to which naps are short
    SPIN_NS = 200000            # approximately the longest spin at sockets
    IDLE_NAPS = 8               # naps, each twice as long as the last, before the thread ends


cdef bint handle_events(Net *net, const epoll_event *events, int count) noexcept nogil:
    """Return whether there was more than a wake-up. The last thread to wake up takes it, because a
    thread that the system has not resumed yet would sleep on without it."""
    cdef Connection *c
    cdef uint64_t unused
    cdef int i, how
    cdef bint moved = False
    for i in range(count):
        c = <Connection *>events[i].data.ptr
        if c == NULL:
            if not (net.polling or net.background_polls):
                eventfd_read(net.wake, &unused)
            continue
        if <void *>c == net:
            if net.shm.asleep == 0:
                drain_doorbell(net.shm)
            continue
        moved = True
        if c.local:
            on_peer_events(net)
            if c.state == LIVE:
                close_local(c, DIED)    # its process has ended
            continue
        if c.state == LIVE and events[i].events & EPOLLOUT:
            on_writable(c)
        if c.state == LIVE and events[i].events & ~EPOLLOUT:
            how = on_readable(c)
            if how != OK:
                end_connection(c, how)
    return moved


cdef bint poll_local(Net *net) noexcept nogil:
    cdef Connection *c
    cdef bint moved = False
    cdef int how
    if net.shm == NULL:
        return False
    if load_u32(&net.shm.members[net.shm.own].events) != net.shm.events_seen:
        on_peer_events(net)
    c = net.local
    while c != NULL:
        if c.state == LIVE and c.local:
            if has_unread(c):
                moved = True
                how = on_readable(c)
                if how != OK:
                    end_connection(c, how)
            if c.out != NULL and has_space(net.shm, &c.outbound):
                moved = True
                on_writable(c)
            if c.coop_item != NULL and advance_coop_copy(c):
                moved = True
            if c.coop_out != NULL and push_pieces(c):
                moved = True
        c = c.next_local
    return moved


cdef bint nothing_to_do(Net *net) noexcept nogil:
    """Return whether there is no work; any later change rings the doorbell."""
    cdef Connection *c = net.local
    if load_u32(&net.shm.members[net.shm.own].events) != net.shm.events_seen:
        return False
    while c != NULL:
        if c.state == LIVE and c.local and (has_unread(c) or coop_copy_waits(c) or (
                c.out != NULL and not request_space(net.shm, &c.outbound))):
            return False
        c = c.next_local
    return True


cdef bint progress(Net *net) noexcept nogil:
    cdef epoll_event events[EVENTS]
    cdef bint moved = poll_local(net)
    cdef int count
    if net.foreign != NULL and net.foreign.needed and net.foreign.progress(net):
        moved = True
    if net.foreign != NULL and net.shm == NULL:
        return moved                # no descriptor can report anything
    count = epoll_wait(net.epoll, events, EVENTS, 0)
    return handle_events(net, events, count) or moved


cdef bint sleep_and_handle(Net *net, bint *sleeping, int timeout_ms) noexcept nogil:
    cdef epoll_event events[EVENTS]
    cdef bint local = net.shm != NULL
    cdef bint moved
    cdef int count
    sleeping[0] = True
    if local:
        announce_sleep(net.shm)
        if not nothing_to_do(net):
            timeout_ms = 0
    pthread_mutex_unlock(&net.lock)
    count = epoll_wait(net.epoll, events, EVENTS, timeout_ms)
    pthread_mutex_lock(&net.lock)
    sleeping[0] = False
    if local:
        end_sleep(net.shm)
    moved = handle_events(net, events, count)
    return poll_local(net) or moved


cdef inline bint has_a_core(const Net *net) noexcept nogil:
    """Return whether this rank may keep its core: see `spins_after_yield`."""
    return net.spins > net.most_spins // 32


cdef bint poll_foreign(Net *net) noexcept nogil:
    """Poll a library repeatedly, since each call may move only some of its bytes. A waiting rank
    with a core to itself polls more often than it yields the core."""
    cdef int _look, looks = LOOKS_PER_YIELD if has_a_core(net) else 1
    if net.foreign.needed and net.most_spins != 0:
        for _look in range(looks):
            if net.foreign.progress(net):
                return True
    return False


cdef bint sleep_briefly(Net *net, int64_t idle_ns) noexcept nogil:
    """Wait without a wake-up. An external library only makes progress when polled. So while cores
    are free and requests may be progressing, yield instead of sleeping."""
    net.polling = True
    pthread_mutex_unlock(&net.lock)
    if has_a_core(net) and idle_ns < PATIENT_NS:
        sched_yield()
    else:
        usleep(SHORT_NAP_US if idle_ns < <int64_t>DOZE_NS else LONG_NAP_US)
    pthread_mutex_lock(&net.lock)
    net.polling = False
    return progress(net) or poll_foreign(net)


cdef bint poll(Net *net, int64_t timeout_ns) noexcept nogil:
    return sleep_and_handle(net, &net.polling, <int>((timeout_ns + 999999) // 1000000))


cdef void sleep_until(pthread_cond_t *condition, pthread_mutex_t *lock,
                      int64_t until) noexcept nogil:
    cdef timespec t
    t.tv_sec = until // 1000000000
    t.tv_nsec = until % 1000000000
    pthread_cond_timedwait(condition, lock, &t)


# Waiting

cdef void watch_peers(Net *net, const Comm *t, Request *r) noexcept nogil:
    cdef int i
    if net.foreign != NULL and r.place == net.foreign:
        net.foreign.give_up(net, r)
        return
    if r.peer != ANY_SOURCE:
        watch_peer(net, t.peers[r.peer], r.tag)
        return
    for i in range(t.size):
        watch_peer(net, t.peers[i], r.tag)


cdef inline bint is_left_to_other_thread(const Net *net) noexcept nogil:
    """Return whether this thread must leave progress to other threads."""
    return net.foreign != NULL and net.foreign.needed and not net.foreign.allowed(net)


cdef int wait(Comm *t, Request *r, int64_t deadline_ns) noexcept nogil:
    cdef Net *net = <Net *>t.link
    cdef int status = load_int(&r.status)
    if status != PENDING:
        return status
    pthread_mutex_lock(&net.lock)
    cdef bint moves = not is_left_to_other_thread(net)
    net.waiters += moves
    if net.background_polls and moves:
        eventfd_write(net.wake, 1)
    status = wait_locked(net, t, r, deadline_ns)
    # A signal handler's exception is kept for its thread, whether the request is complete or not.
    if r.status != PENDING and status != INTERRUPTED:
        status = r.status
    net.waiters -= moves
    if net.sleepers != 0:
        pthread_cond_broadcast(&net.changed)    # one of them polls from now on
    pthread_mutex_unlock(&net.lock)
    return status


cdef bint polls_foreign(const Net *net, unsigned int iteration) noexcept nogil:
    return (net.foreign != NULL and net.foreign.needed
            and (net.shm == NULL or iteration % LOOKS_PER_FOREIGN == 0))


cdef bint polls_epoll(const Net *net, unsigned int iteration) noexcept nogil:
    # Without sockets epoll only reports deaths, which can wait.
    if net.shm == NULL:
        return net.foreign == NULL
    return iteration % LOOKS_PER_DEATH == 0 or (net.live != 0 and iteration % LOOKS_PER_POLL == 0)


cdef bint is_slow_poll(const Net *net, unsigned int iteration) noexcept nogil:
    return polls_foreign(net, iteration) or polls_epoll(net, iteration)


cdef bint poll_once(Net *net, unsigned int iteration) noexcept nogil:
    cdef bint moved = polls_foreign(net, iteration) and net.foreign.progress(net)
    if polls_epoll(net, iteration):
        return progress(net) or moved
    return poll_local(net) or moved


cdef void spin(Net *net, const Request *r, int64_t until) noexcept nogil:
    cdef int spins = net.spins, iteration = 0, iterations = 0
    cdef bint moved
    while iteration < spins and iterations < MOST_POLLS:
        iteration += 1
        iterations += 1 if net.shm != NULL else LOOKS_PER_POLL
        moved = poll_once(net, iteration)
        if moved:
            iteration = 0       # bytes are arriving
        # Any number of those bytes may be for other requests.
        if r.status != PENDING or (moved and now_ns() >= until):
            break
        if net.shm != NULL:
            pause()
    net.spins = spins_after(spins, net.most_spins, r.status != PENDING or iteration == 0)


cdef bint offer_core(Net *net) noexcept nogil:
    """Yield the core; return whether no other thread took it."""
    cdef int64_t took, began
    pthread_mutex_unlock(&net.lock)
    began = now_ns()
    sched_yield()
    took = now_ns() - began
    pthread_mutex_lock(&net.lock)
    net.spins = spins_after_yield(net.spins, net.most_spins, took)
    return took <= SWITCH_NS


cdef void yield_core(Net *net, const Request *r, int64_t until) noexcept nogil:
    """Look and yield the core, for longer if bytes arrive. Another rank may keep the core for as
    long as it spins, so look at the sockets, too, before each time."""
    cdef int64_t now = now_ns()
    cdef int64_t idle_until = now + YIELD_NS
    cdef int iteration = 0
    cdef bint moved
    while now < idle_until and now < until:
        iteration += 1
        moved = progress(net) if net.live != 0 else poll_once(net, iteration)
        if r.status == PENDING and net.foreign != NULL and poll_foreign(net):
            moved = True
        if r.status != PENDING:
            break
        if not moved:
            offer_core(net)
        now = now_ns()
        if moved:
            idle_until = now + YIELD_NS


cdef int wait_locked(Net *net, Comm *t, Request *r, int64_t deadline_ns) noexcept nogil:
    cdef int status = OK
    cdef bint moved = True, free = False
    cdef int64_t now = now_ns()
    # A caller that queries peers waits in parts. Each part continues the idle time of the last.
    cdef int64_t idle_since = net.idle_since if net.waited_for == r else now
    cdef int64_t until = slice_until(now, deadline_ns)
    while r.status == PENDING and status == OK:
        # Do not keep a second waiter from the lock.
        if moved and net.waiters == 1 and not is_left_to_other_thread(net):
            moved = False
            spin(net, r, until)
            if r.status != PENDING:
                break
            if net.shm != NULL or net.foreign != NULL or not has_a_core(net):
                yield_core(net, r, until)
            elif net.most_spins != 0:
                free = offer_core(net)
            continue
        now = now_ns()
        reach(WAIT)
        if now >= until:
            pthread_mutex_unlock(&net.lock)
            status = slice_end(t, deadline_ns)
            pthread_mutex_lock(&net.lock)
            if status == OK and r.status == PENDING and contradicted(&net.queues, t, r):
                status = MISMATCH
            if r.status == PENDING:
                watch_peers(net, t, r)
            look_for_silence(net, now_ns())
            until = slice_until(now_ns(), deadline_ns)
        elif net.polling or is_left_to_other_thread(net):
            net.sleepers += 1
            sleep_until(&net.changed, &net.lock, until)
            net.sleepers -= 1
        elif net.foreign != NULL and net.foreign.needed:
            moved = sleep_briefly(net, now - idle_since)
            if moved:
                idle_since = now
        else:
            moved = poll(net, until - now)
            if moved and now_ns() - now < SPIN_NS:
                net.spins = spins_after_short_sleep(net.spins, net.most_spins, free)
    net.waited_for = r if status == TIMEOUT else NULL
    net.idle_since = idle_since
    return status


# The background thread

cdef void *background(void *argument) noexcept nogil:
    cdef Net *net = <Net *>argument
    cdef int naps = 0
    pthread_mutex_lock(&net.lock)
    while not net.stopping and (net.in_flight != 0 or naps < IDLE_NAPS):
        if net.in_flight == 0:
            sleep_until(&net.resume, &net.lock, now_ns() + (<int64_t>NAP_NS << naps))
            naps += 1
        elif net.waiters != 0:
            naps = 0
            sleep_until(&net.resume, &net.lock, now_ns() + NAP_NS)
        else:
            naps = 0
            sleep_and_handle(net, &net.background_polls, BACKGROUND_MS)
            look_for_silence(net, now_ns())
    net.background_runs = False
    pthread_mutex_unlock(&net.lock)
    return NULL


cdef void ensure_background(Net *net) noexcept nogil:
    cdef sigset_t every, before
    if net.background_runs or net.stopping or net.closed:
        return
    if net.foreign != NULL and net.shm == NULL:
        return                      # its own rules say which threads may call the library
    if net.background_joinable:
        pthread_join(net.background, NULL)      # it has released the lock for the last time
        net.background_joinable = False
    # Signals are for the interpreter's threads.
    sigfillset(&every)
    pthread_sigmask(SIG_SETMASK, &every, &before)
    if pthread_create(&net.background, NULL, background, net) == 0:
        net.background_runs = net.background_joinable = True
    pthread_sigmask(SIG_SETMASK, &before, NULL)


cdef void stop_background(Net *net) noexcept nogil:
    pthread_mutex_lock(&net.lock)
    net.stopping = True
    pthread_cond_broadcast(&net.resume)
    eventfd_write(net.wake, 1)
    pthread_mutex_unlock(&net.lock)
    if net.background_joinable:
        pthread_join(net.background, NULL)
        net.background_joinable = False
