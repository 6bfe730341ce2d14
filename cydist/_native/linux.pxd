"""Functions of the system that the transports use and Cython does not declare."""
from libc.errno cimport EINTR
from libc.stdint cimport uint32_t, uint64_t
from posix.time cimport timespec


cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct pthread_cond_t:
        pass
    ctypedef struct pthread_condattr_t:
        pass
    ctypedef struct pthread_t:
        pass
    ctypedef struct pthread_mutexattr_t:
        pass
    int pthread_mutexattr_init(pthread_mutexattr_t *)
    int pthread_mutexattr_setpshared(pthread_mutexattr_t *, int)
    int pthread_mutexattr_setrobust(pthread_mutexattr_t *, int)
    int pthread_mutexattr_destroy(pthread_mutexattr_t *)
    int PTHREAD_PROCESS_SHARED
    int PTHREAD_MUTEX_ROBUST
    int pthread_mutex_consistent(pthread_mutex_t *)
    int pthread_mutex_init(pthread_mutex_t *, const void *)
    int pthread_mutex_lock(pthread_mutex_t *)
    int pthread_mutex_trylock(pthread_mutex_t *)
    int pthread_mutex_unlock(pthread_mutex_t *)
    int pthread_mutex_destroy(pthread_mutex_t *)
    int pthread_condattr_init(pthread_condattr_t *)
    int pthread_condattr_setclock(pthread_condattr_t *, int)
    int pthread_condattr_destroy(pthread_condattr_t *)
    int pthread_cond_init(pthread_cond_t *, const pthread_condattr_t *)
    int pthread_cond_destroy(pthread_cond_t *)
    int pthread_cond_broadcast(pthread_cond_t *)
    int pthread_cond_timedwait(pthread_cond_t *, pthread_mutex_t *, const timespec *)
    int pthread_create(pthread_t *, const void *, void *(*)(void *) noexcept nogil, void *)
    int pthread_join(pthread_t, void **)
    pthread_t pthread_self()
    int pthread_equal(pthread_t, pthread_t)
    int pthread_atfork(void (*)() noexcept nogil, void (*)() noexcept nogil,
                       void (*)() noexcept nogil)


cdef extern from "<dlfcn.h>" nogil:
    void *dlopen(const char *, int)
    void *dlsym(void *, const char *)
    int RTLD_NOW


cdef extern from "<string.h>" nogil:
    void explicit_bzero(void *, size_t)


cdef extern from "<signal.h>" nogil:
    ctypedef struct sigset_t:
        pass
    int sigfillset(sigset_t *)
    int pthread_sigmask(int, const sigset_t *, sigset_t *)
    int SIG_SETMASK


cdef extern from "<sys/epoll.h>" nogil:
    ctypedef union epoll_data_t:
        void *ptr
    struct epoll_event:
        uint32_t events
        epoll_data_t data
    int epoll_create1(int)
    int epoll_ctl(int, int, int, epoll_event *)
    int epoll_wait(int, epoll_event *, int, int)
    int EPOLL_CLOEXEC
    int EPOLL_CTL_ADD
    int EPOLL_CTL_MOD
    int EPOLL_CTL_DEL
    uint32_t EPOLLIN
    uint32_t EPOLLOUT


cdef extern from "<sys/eventfd.h>" nogil:
    int eventfd(unsigned int, int)
    int eventfd_read(int, uint64_t *)
    int eventfd_write(int, uint64_t)
    int EFD_CLOEXEC
    int EFD_NONBLOCK


cdef extern from "<sys/socket.h>" nogil:
    struct iovec:
        void *iov_base
        size_t iov_len
    struct msghdr:
        iovec *msg_iov
        size_t msg_iovlen
    ssize_t sendmsg(int, const msghdr *, int)
    ssize_t recvmsg(int, msghdr *, int)
    ssize_t send(int, const void *, size_t, int)
    ssize_t recv(int, void *, size_t, int)
    int shutdown(int, int)
    int MSG_NOSIGNAL
    int MSG_DONTWAIT
    int SHUT_RDWR
    int SHUT_WR


cdef extern from "<sys/uio.h>" nogil:
    ssize_t process_vm_readv(int, const iovec *, unsigned long, const iovec *, unsigned long,
                             unsigned long)
    ssize_t process_vm_writev(int, const iovec *, unsigned long, const iovec *, unsigned long,
                              unsigned long)


cdef extern from "<sys/ioctl.h>" nogil:
    int ioctl(int, unsigned long, int *)


cdef extern from "<linux/sockios.h>" nogil:
    unsigned long SIOCOUTQ          # bytes that the other host has not acknowledged
    unsigned long SIOCOUTQNSD       # bytes that have not been sent


cdef extern from "<sys/mman.h>" nogil:
    void *mmap(void *, size_t, int, int, int, long)
    int munmap(void *, size_t)
    int memfd_create(const char *, unsigned int)
    unsigned int MFD_CLOEXEC
    unsigned int MFD_ALLOW_SEALING
    int PROT_READ
    int PROT_WRITE
    int MAP_PRIVATE
    int MAP_SHARED
    int MAP_ANONYMOUS
    void *MAP_FAILED


cdef extern from "<fcntl.h>" nogil:
    int fcntl(int, int, ...)
    int posix_fallocate(int, long, long)
    int fallocate(int, int, long, long)
    int FALLOC_FL_KEEP_SIZE
    int FALLOC_FL_PUNCH_HOLE
    int F_ADD_SEALS
    int F_GET_SEALS
    int F_SEAL_SEAL
    int F_SEAL_SHRINK
    int F_SEAL_GROW


cdef enum:
    COMMIT_BYTES = 262144       # of memory that is allocated in one call


cdef inline int take_pages(int fd, uint64_t offset, uint64_t nbytes) noexcept nogil:
    """Allocate the pages of these bytes of a memfd, or release all of them: 0, or the error.

    A signal makes the system release what one call had allocated. So each call allocates few
    bytes and is repeated: even under a profiler's frequent signals it makes progress.
    """
    cdef uint64_t done = 0, piece
    cdef int error = 0
    while done < nbytes and error == 0:
        piece = min(nbytes - done, <uint64_t>COMMIT_BYTES)
        error = posix_fallocate(fd, offset + done, piece)
        if error == EINTR:
            error = 0
        elif error == 0:
            done += piece
    if error != 0:
        fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, nbytes)
    return error


cdef extern from "<sys/stat.h>" nogil:
    struct stat_t "stat":
        long st_size
        unsigned int st_mode
        unsigned long st_ino
        unsigned int st_uid
    int fstat(int, stat_t *)
    int fchmod(int, unsigned int)


cdef extern from "<poll.h>" nogil:
    struct pollfd:
        int fd
        short events
        short revents
    int poll(pollfd *, unsigned long, int)
    short POLLIN


cdef extern from *:
    """
    #include <sys/syscall.h>
    #include <unistd.h>
    /* A descriptor that is readable once the process has ended; -1: no such process. */
    static inline int cydist_pidfd_open(int pid) { return (int)syscall(SYS_pidfd_open, pid, 0); }
    """
    int pidfd_open "cydist_pidfd_open"(int pid) nogil


cdef extern from "<unistd.h>" nogil:
    int ftruncate(int, long)
    int close(int)
    int getpid()
    unsigned int geteuid()
    int usleep(unsigned int)
