"""Failpoints: end or stop this process, or hold a thread, at a place that a test names.

None is armed unless CYDIST_FAILPOINT asks for one; a place then costs one comparison.
"""
from libc.stdint cimport uint32_t
from libc.signal cimport SIGKILL, SIGSTOP, raise_ as raise_signal

from cydist._native.sync cimport add_u32, load_int, store_int

cdef extern from "<unistd.h>" nogil:
    void leave "_exit"(int)
    int usleep(unsigned int)

POINTS = ("", "enter", "send.mid", "recv.mid", "wait", "leave", "rendezvous", "connect", "table",
          "zero", "post")
ACTIONS = ("kill", "stop", "exit", "hold")

cdef enum:
    EXIT_CODE = 70
    HOLD_PAUSE_US = 1000

cdef int action
cdef uint32_t passes        # how often the place is still to be reached
cdef int held               # whether a thread is held at the place

armed = NOWHERE


cdef void hit() noexcept nogil:
    if load_int(&armed) == NOWHERE or add_u32(&passes, <uint32_t>-1) != 0:
        return
    store_int(&armed, NOWHERE)
    if action == 0:
        raise_signal(SIGKILL)
    elif action == 1:
        raise_signal(SIGSTOP)
    elif action == 2:
        leave(EXIT_CODE)
    else:
        store_int(&held, True)
        while load_int(&held):
            usleep(HOLD_PAUSE_US)


def arm(str spec not None):
    """Arm `POINT:ACTION[:N]`, for one use. When the point is reached for the Nth time (default:
    the first), `kill` this process, `stop` it (SIGSTOP), `exit` with code 70, or `hold` the thread
    that is there, with the GIL if it has it, until the next call of this function. "" disarms.

    Raises ValueError for a point or an action that does not exist.
    """
    global action, passes
    store_int(&held, False)
    if not spec:
        store_int(&armed, NOWHERE)
        return
    point, _, rest = spec.partition(":")
    what, _, nth = rest.partition(":")
    if point not in POINTS or what not in ACTIONS or not (nth or "1").isdecimal():
        raise ValueError(
            f"{spec!r} is no failpoint: POINT:ACTION[:N], where POINT is one of "
            f"{', '.join(POINTS[1:])} and ACTION one of {', '.join(ACTIONS)}")
    action = ACTIONS.index(what)
    passes = max(int(nth or 1), 1)
    store_int(&armed, POINTS.index(point))


def holds():
    """Return whether a thread is held at a failpoint."""
    return load_int(&held) != 0


def failpoint(str point not None):
    """Mark this place as the one called `point`."""
    reach(POINTS.index(point))
