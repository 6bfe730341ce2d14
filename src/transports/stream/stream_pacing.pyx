"""Both ways of a slow network in step: see stream_pacing.pxd.

Without this, two hosts of two ranks reached 0.72 to 0.88 of 1 Gbit/s each way, and 0.9 to 0.97 with
it (docs/dev/lab_notes.md, "Segments on a slow link"). With twice as many bytes ahead, or half as
many, it was less.
"""
from libc.stdint cimport int64_t

from cydist._native.stream_silence cimport Traffic, traffic_of


cdef enum:
    AHEAD_US = 2000
    ROUND_TRIPS = 4             # of a distant peer, where they take longer
    LEAST_AHEAD = 65536
    FAST = 200                  # bytes in a microsecond
    LONGEST_NS = 100000000
    LOOK_BYTES = 1048576        # between two looks at a connection
    LEAST_BUSY_US = 20000       # of a measurement: the kernel counts in ticks of milliseconds
    GAP_NS = 5000000            # between long data, in which TCP may have been idle
    LEAST_UNACKED = 10          # segments: then it was not


cdef void count_written(Exchange *e, size_t nbytes) noexcept nogil:
    if e.paced:
        e.ahead += <int64_t>nbytes


cdef void measure(Exchange *e, Pace *p, int fd, size_t nbytes, int64_t now) noexcept nogil:
    cdef Traffic t
    if now - p.written_at > GAP_NS and traffic_of(fd, &t) and t.unacked < LEAST_UNACKED:
        p.delivered, p.busy_us = t.taken, t.busy_us     # the time between counts as busy at times
    p.written_at = now
    p.unmeasured += nbytes
    if p.unmeasured < LOOK_BYTES or not traffic_of(fd, &t):
        return
    p.unmeasured = 0
    if t.busy_us - p.busy_us >= LEAST_BUSY_US:
        set_pace(e, p, t.taken - p.delivered, t.busy_us - p.busy_us, t.round_trip_us)
        p.delivered, p.busy_us = t.taken, t.busy_us


cdef void set_pace(Exchange *e, Pace *p, int64_t nbytes, int64_t busy_us,
                   int64_t round_trip_us) noexcept nogil:
    cdef int64_t rate = max(nbytes // busy_us, <int64_t>1), most
    p.most_ahead = 0
    if rate < FAST:
        most = rate * max(ROUND_TRIPS * round_trip_us, <int64_t>AHEAD_US)
        most = max(most, <int64_t>LEAST_AHEAD)
        p.most_ahead = <size_t>most
        e.period_ns = min(most * 1000 // rate, <int64_t>LONGEST_NS)
        e.paced = True


cdef void count_read(Exchange *e, size_t nbytes, int64_t now) noexcept nogil:
    begin_period(e, now)
    e.read_now += nbytes
    e.ahead = max(e.ahead - <int64_t>nbytes, <int64_t>0)


cdef inline void begin_period(Exchange *e, int64_t now) noexcept nogil:
    if now - e.began >= e.period_ns:
        e.read_before = e.read_now if now - e.began < 2 * e.period_ns else 0
        e.read_now = 0
        e.began = now


cdef size_t room(Exchange *e, const Pace *p, size_t nbytes, int64_t now) noexcept nogil:
    cdef int64_t left
    if p.most_ahead == 0:
        return nbytes
    begin_period(e, now)
    if 2 * (e.read_now + e.read_before) < p.most_ahead:
        e.ahead = e.paused_at = 0   # nothing comes, or much less than leaves
        return nbytes
    if e.paused_at != 0 and now - e.paused_at >= e.period_ns // 2:
        e.ahead = 0             # the other side is late, or has less to send
    left = <int64_t>p.most_ahead - e.ahead
    if left < <int64_t>min(nbytes, p.most_ahead // 4):
        if e.paused_at == 0:
            e.paused_at = now
        return 0
    e.paused_at = 0
    return min(nbytes, <size_t>left)
