"""Who moves messages over TCP on, and who sleeps.

Whoever waits makes progress for everybody: one waiting thread (the poller) sleeps in
epoll_wait without the lock, the others on a condition variable. When point-to-point requests
are pending and nobody waits, a background thread polls instead; it steps aside as soon as
somebody does, and ends when nothing has been pending for a while.
"""
from libc.stdint cimport int64_t, uint64_t
from posix.time cimport timespec

from cydist._native.abi cimport OK, now_ns
from cydist._native.incoming cimport readable
from cydist._native.linux cimport (
    EPOLLOUT, SIG_SETMASK, epoll_event, epoll_wait, eventfd_read, eventfd_write,
    pthread_cond_broadcast, pthread_cond_t, pthread_cond_timedwait, pthread_create, pthread_join,
    pthread_mutex_lock, pthread_mutex_t, pthread_mutex_unlock, pthread_sigmask, sigfillset,
    sigset_t,
)
from cydist._native.outgoing cimport writable
from cydist._native.peers cimport end
from cydist._native.stream cimport Connection, LIVE, Net


cdef enum:
    EVENTS = 32
    BACKGROUND_MS = 50          # the longest sleep of the background thread in epoll_wait
    NAP_NS = 1000000            # how soon it looks again whether somebody waits
    IDLE_NAPS = 8               # naps, each twice as long as the one before, until it ends


cdef void handle(Net *net, const epoll_event *events, int count) noexcept nogil:
    cdef Connection *c
    cdef uint64_t unused
    cdef int i, how
    for i in range(count):
        c = <Connection *>events[i].data.ptr
        if c == NULL:
            eventfd_read(net.wake, &unused)
            continue
        if c.state == LIVE and events[i].events & EPOLLOUT:
            writable(c)
        if c.state == LIVE and events[i].events & ~EPOLLOUT:
            how = readable(c)
            if how != OK:
                end(c, how)


cdef void progress(Net *net) noexcept nogil:
    cdef epoll_event events[EVENTS]
    handle(net, events, epoll_wait(net.epoll, events, EVENTS, 0))


cdef void poll(Net *net, int64_t timeout_ns) noexcept nogil:
    cdef epoll_event events[EVENTS]
    cdef int count
    net.polling = True
    pthread_mutex_unlock(&net.lock)
    count = epoll_wait(net.epoll, events, EVENTS, <int>((timeout_ns + 999999) // 1000000))
    pthread_mutex_lock(&net.lock)
    net.polling = False
    handle(net, events, count)


cdef void sleep_until(pthread_cond_t *condition, pthread_mutex_t *lock,
                      int64_t until) noexcept nogil:
    cdef timespec t
    t.tv_sec = until // 1000000000
    t.tv_nsec = until % 1000000000
    pthread_cond_timedwait(condition, lock, &t)


# The background thread

cdef void *background(void *argument) noexcept nogil:
    cdef Net *net = <Net *>argument
    cdef epoll_event events[EVENTS]
    cdef int count, naps = 0
    pthread_mutex_lock(&net.lock)
    while not net.stopping and (net.moving != 0 or naps < IDLE_NAPS):
        if net.moving == 0:
            sleep_until(&net.resume, &net.lock, now_ns() + (<int64_t>NAP_NS << naps))
            naps += 1
        elif net.waiters != 0:
            naps = 0
            sleep_until(&net.resume, &net.lock, now_ns() + NAP_NS)
        else:
            naps = 0
            net.background_polls = True
            pthread_mutex_unlock(&net.lock)
            count = epoll_wait(net.epoll, events, EVENTS, BACKGROUND_MS)
            pthread_mutex_lock(&net.lock)
            net.background_polls = False
            handle(net, events, count)
    net.background_runs = False
    pthread_mutex_unlock(&net.lock)
    return NULL


cdef void ensure_background(Net *net) noexcept nogil:
    cdef sigset_t every, before
    if net.background_runs or net.stopping or net.closed:
        return
    if net.background_joinable:
        pthread_join(net.background, NULL)      # it has let go of the lock for the last time
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
