"""Failpoints: end or stop this process at a place that a test names.

None is armed unless CYDIST_FAILPOINT asks for one; a place then costs one comparison.
"""
from libc.signal cimport SIGKILL, SIGSTOP, raise_ as raise_signal

cdef extern from "<unistd.h>" nogil:
    void leave "_exit"(int)

POINTS = ("", "enter", "send.mid", "recv.mid", "wait", "leave", "rendezvous", "connect", "table",
          "zero")
ACTIONS = ("kill", "stop", "exit")

cdef enum:
    EXIT_CODE = 70

cdef int action
cdef long passes            # how often the place is still passed without effect

armed = NOWHERE


cdef void hit() noexcept nogil:
    global armed, passes
    if passes > 0:
        passes -= 1
        return
    armed = NOWHERE
    if action == 0:
        raise_signal(SIGKILL)
    elif action == 1:
        raise_signal(SIGSTOP)
    else:
        leave(EXIT_CODE)


def arm(str spec not None):
    """Arm `POINT:ACTION[:N]`, for one use. When the point is reached for the Nth time (default:
    the first), `kill` this process, `stop` it (SIGSTOP), or `exit` with code 70. "" disarms.

    Raises ValueError for a point or an action that does not exist.
    """
    global armed, action, passes
    if not spec:
        armed = NOWHERE
        return
    point, _, rest = spec.partition(":")
    what, _, nth = rest.partition(":")
    if point not in POINTS or what not in ACTIONS or not (nth or "1").isdecimal():
        raise ValueError(
            f"{spec!r} is no failpoint: POINT:ACTION[:N], where POINT is one of "
            f"{', '.join(POINTS[1:])} and ACTION one of {', '.join(ACTIONS)}")
    action = ACTIONS.index(what)
    passes = int(nth or 1) - 1
    armed = POINTS.index(point)


def failpoint(str point not None):
    """Mark this place as the one called `point`."""
    reach(POINTS.index(point))
