"""Forked children close their copies of a parent's sockets, so that its peers notice when
it dies. Python's own handlers see only forks that Python makes; these handlers see every fork().
"""
from libc.stdlib cimport realloc

from cydist._native.linux cimport (
    close, pthread_atfork, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t,
    pthread_mutex_unlock,
)
from cydist._native.shm_peers cimport close_local_peers
from cydist._native.stream_peers cimport forget_keys
from cydist._native.stream cimport LIVE, WANTED, Net

cdef extern from "<fcntl.h>" nogil:
    int open(const char *, int)
    int O_RDONLY
    int O_CLOEXEC

cdef extern from "<unistd.h>" nogil:
    int dup2(int, int)

cdef Net *first = NULL
cdef int *listeners = NULL      # descriptors whose numbers Python's sockets own
cdef int listeners_count = 0
cdef pthread_mutex_t lock
pthread_mutex_init(&lock, NULL)


# All locks are held during the fork, so that the child finds no change half done.

cdef void lock_all() noexcept nogil:
    cdef Net *net
    pthread_mutex_lock(&lock)
    net = first
    while net != NULL:
        pthread_mutex_lock(&net.lock)
        net = net.next


cdef void unlock_all() noexcept nogil:
    cdef Net *net = first
    while net != NULL:
        pthread_mutex_unlock(&net.lock)
        net = net.next
    pthread_mutex_unlock(&lock)


cdef void abandon_in_child() noexcept nogil:
    cdef Net *net = first
    cdef int i, nothing
    for i in range(listeners_count):
        close(listeners[i])     # first: there may be no other free descriptor
        nothing = open("/dev/null", O_RDONLY | O_CLOEXEC)
        if nothing >= 0 and nothing != listeners[i]:
            dup2(nothing, listeners[i])
            close(nothing)
    while net != NULL:
        abandon_net(net)
        net = net.next
    unlock_all()


if pthread_atfork(lock_all, unlock_all, abandon_in_child) != 0:
    raise MemoryError("no memory for handlers of forks")


def replace_in_child(int fd):
    """Replace this descriptor by /dev/null in every forked child, until `keep_in_child`."""
    global listeners, listeners_count
    cdef int *more
    with nogil:
        pthread_mutex_lock(&lock)
        more = <int *>realloc(listeners, (listeners_count + 1) * sizeof(int))
        if more != NULL:
            more[listeners_count] = fd
            listeners = more
            listeners_count += 1
        pthread_mutex_unlock(&lock)
    if more == NULL:
        raise MemoryError("no memory for a descriptor")


def keep_in_child(int fd):
    """Forget this descriptor, which is about to be closed."""
    global listeners_count
    cdef int i
    with nogil:
        pthread_mutex_lock(&lock)
        for i in range(listeners_count):
            if listeners[i] == fd:
                listeners_count -= 1
                listeners[i] = listeners[listeners_count]
                break
        pthread_mutex_unlock(&lock)


cdef void register_net(Net *net) noexcept nogil:
    global first
    pthread_mutex_lock(&lock)
    net.next = first
    first = net
    pthread_mutex_unlock(&lock)


cdef void unregister_net(Net *net) noexcept nogil:
    cdef Net **place = &first
    pthread_mutex_lock(&lock)
    while place[0] != NULL and place[0] != net:
        place = &place[0].next
    if place[0] == net:
        place[0] = net.next
    pthread_mutex_unlock(&lock)


cdef void abandon_net(Net *net) noexcept nogil:
    cdef int i
    net.closed = True
    for i in range(net.size * net.lanes):
        if net.connections[i] != NULL and net.connections[i].state == LIVE:
            if net.connections[i].fd >= 0:
                close(net.connections[i].fd)
            forget_keys(net.connections[i])
            net.connections[i].state = WANTED
    close_descriptors(net)


cdef void close_descriptors(Net *net) noexcept nogil:
    if net.shm != NULL:
        close_local_peers(net.shm)
    if net.epoll >= 0:
        close(net.epoll)
    if net.wake >= 0:
        close(net.wake)
    if net.wanted_event >= 0:
        close(net.wanted_event)
    net.epoll = net.wake = net.wanted_event = -1
