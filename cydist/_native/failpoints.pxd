"""Places in compiled code where a test can stop or end this process, or hold a thread."""

from cydist._native.sync cimport glance_int


cdef enum Point:            # POINTS in the body names them, in this order
    NOWHERE = 0
    ENTER = 1               # a collective has begun, nothing is sent
    SEND_MID = 2            # a message is half written; windows: not announced yet
    RECV_MID = 3            # a message has half arrived
    WAIT = 4                # a wait has gone to sleep
    LEAVE = 5               # the link is about to send its departure notice
    RENDEZVOUS = 6          # the store is reached, the other ranks are not (from Python)
    CONNECT = 7             # a peer is connected but not authenticated (from Python)
    TABLE = 8               # the lock of the shared memory's table is held
    ZERO = 9                # a group has got used memory, which is about to be zeroed
    POST = 10               # a message is about to be posted, and its group was open

cdef int armed              # the Point where something will happen

# Do what arm() asked for, if this is the place and the time.
cdef void hit() noexcept nogil


cdef inline void reach(int point) noexcept nogil:
    if glance_int(&armed) == point:
        hit()
