"""Notice that the host at the other end of a connection has vanished.

The verdict is about kernels: they answer probes and acknowledge bytes whatever their processes do.
So a peer that is stopped, computes, or does not read is alive. While a connection is idle, this
host's kernel probes the other one and ends the connection itself. While bytes are under way it does
not, so the connection's user looks (src/transports/stream/stream_silence.pyx).
"""

from __future__ import annotations

import contextlib
import math
import socket

from cydist import config
from cydist._native import keepalive_times, longest_repetition_pause

LEAST_TIMEOUT = 2.0  # seconds: kernels count the probes of idle connections in seconds
_TCP_RTO_MAX_MS = 44  # since Linux 6.15


def peer_timeout() -> float:
    """Return CYDIST_PEER_TIMEOUT in seconds; inf: hosts may be silent for ever.

    Raises ValueError for anything else than 2 or more.
    """
    text = config.PEER_TIMEOUT.get()
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds >= LEAST_TIMEOUT:
        raise ValueError(
            f"{config.PEER_TIMEOUT.names[0]}={text!r} is not {LEAST_TIMEOUT:g} or more seconds, "
            "nor inf"
        )
    return seconds


def watch_idle(sock: socket.socket, seconds: float | None = None) -> None:
    """Let the kernel end this connection when it is idle and the other host has been silent.

    Args:
        seconds: How long; None: for CYDIST_PEER_TIMEOUT; inf: for ever.

    Raises OSError.
    """
    seconds = peer_timeout() if seconds is None else seconds
    if math.isinf(seconds):
        return
    idle, interval = keepalive_times(seconds)
    probes = min(max(1, int((seconds - idle - 1) / interval)), 127)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)
    # Without a limit pauses between repetitions grow to two minutes: a network that is back would
    # not be noticed, nor would a host that vanishes while its ranks do not read.
    longest = int(1000 * longest_repetition_pause(seconds))
    with contextlib.suppress(OSError):  # an older kernel
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, longest)
