"""Forked children let go of their copies of a parent's sockets, so that its peers notice when
it dies. Python's own handlers see only forks that Python makes; these see every fork().
"""
from cydist._native.linux cimport (
    close, pthread_atfork, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t,
    pthread_mutex_unlock,
)
from cydist._native.stream cimport LIVE, WANTED, Net

cdef Net *first = NULL
cdef pthread_mutex_t lock
pthread_mutex_init(&lock, NULL)


# All locks are held during the fork, so that the child finds nothing half done.

cdef void before() noexcept nogil:
    cdef Net *net
    pthread_mutex_lock(&lock)
    net = first
    while net != NULL:
        pthread_mutex_lock(&net.lock)
        net = net.next


cdef void after() noexcept nogil:
    cdef Net *net = first
    while net != NULL:
        pthread_mutex_unlock(&net.lock)
        net = net.next
    pthread_mutex_unlock(&lock)


cdef void after_in_child() noexcept nogil:
    cdef Net *net = first
    while net != NULL:
        abandon(net)
        net = net.next
    after()


if pthread_atfork(before, after, after_in_child) != 0:
    raise MemoryError("no memory for handlers of forks")


cdef void remember(Net *net) noexcept nogil:
    global first
    pthread_mutex_lock(&lock)
    net.next = first
    first = net
    pthread_mutex_unlock(&lock)


cdef void forget(Net *net) noexcept nogil:
    cdef Net **place = &first
    pthread_mutex_lock(&lock)
    while place[0] != NULL and place[0] != net:
        place = &place[0].next
    if place[0] == net:
        place[0] = net.next
    pthread_mutex_unlock(&lock)


cdef void abandon(Net *net) noexcept nogil:
    cdef int i
    net.closed = True
    for i in range(net.size * net.lanes):
        if net.connections[i] != NULL and net.connections[i].state == LIVE:
            close(net.connections[i].fd)
            net.connections[i].state = WANTED
    close_descriptors(net)


cdef void close_descriptors(Net *net) noexcept nogil:
    if net.epoll >= 0:
        close(net.epoll)
    if net.wake >= 0:
        close(net.wake)
    if net.wanted_event >= 0:
        close(net.wanted_event)
    net.epoll = net.wake = net.wanted_event = -1
