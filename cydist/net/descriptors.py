"""The limit of this process's descriptors, raised where it serves all ranks of a job."""

from __future__ import annotations

import os
import resource

from cydist.errors import DistNetworkError

_UNLIMITED = resource.RLIM_INFINITY


def make_room(wanted: int, least: int, purpose: str) -> None:
    """Raise the soft limit of descriptors, if it is too low for `wanted` more of them and what this
    process has beside.

    The limit grows by what is wanted, so that the program keeps its own share. Processes that it
    starts from now on inherit the new limit.

    Args:
        least: Further descriptors without which it makes no sense to begin.
        purpose: For the message.

    Raises DistNetworkError if the hard limit leaves no room for `least`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:  # none is left, which the next socket says
        return
    if soft == _UNLIMITED or used + wanted + wanted // 4 <= soft:
        return
    if hard != _UNLIMITED and used + least > hard:
        raise DistNetworkError(
            f"{purpose} takes {least} descriptors, and this process may have {hard}, of which "
            f"{used} are in use: raise the hard limit (ulimit -Hn, LimitNOFILE= of systemd)"
        )
    more = soft + wanted + wanted // 4
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (more if hard == _UNLIMITED else min(more, hard), hard)
    )
