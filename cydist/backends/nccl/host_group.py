"""The CPU group of a GPU group: reports of its ranks, and notices of failures."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import TYPE_CHECKING

from cydist import _native, errors
from cydist.backends.host.group import HostGroup
from cydist.backends.host.work import FAILURE_TAG

if TYPE_CHECKING:
    from cydist._native import CallRecord
    from cydist.groups.process_group import ProcessGroup
    from cydist.work import Work

FAILURE_BYTES = 8192
SEND_SECONDS = 0.5


class ControlGroup(HostGroup):
    """A group of backend "tcp" that answers queries about a GPU group's ranks.

    Attributes:
        speaks_for: The GPU group; None until it is made.
    """

    speaks_for: ProcessGroup | None = None

    def last_call(self) -> CallRecord | None:
        own = super().last_call()
        if (own is not None and not own.over) or self.speaks_for is None:
            return own
        return self.speaks_for.last_call()


class ControlListener:
    """Failure notices over a group of CPU memory with the same ranks. The tag is used for nothing
    else."""

    def __init__(self, host: ProcessGroup) -> None:
        self._host = host
        self._lock = threading.Lock()  # shared by the watchdog and threads that make calls
        self._failure = _native.empty(FAILURE_BYTES)
        self._coming: Work | None = host.irecv(self._failure, None, FAILURE_TAG)
        self.lost: BaseException | None = None  # why no more notices can arrive
        self._coming.due(None)  # without errors it waits longer than a call may take

    def broadcast(self, error: BaseException) -> None:
        """Notify all ranks; best effort."""
        words = {
            "kind": type(error).__name__,
            "text": str(error)[:1200],
            "op": getattr(error, "op", None),
            "seq": getattr(error, "seq", None),
            "ranks": list(getattr(error, "ranks", ()))[:16],
        }
        array = _native.empty(FAILURE_BYTES)
        memoryview(array)[:] = json.dumps(words).encode()[:FAILURE_BYTES].ljust(FAILURE_BYTES)
        others = [rank for rank in range(self._host.size()) if rank != self._host.rank()]
        end = time.monotonic() + SEND_SECONDS
        with contextlib.suppress(errors.DistError):
            for work in [self._host.isend(array, rank, FAILURE_TAG) for rank in others]:
                with contextlib.suppress(errors.DistError):
                    work.wait(max(0.0, end - time.monotonic()))

    def received(self) -> errors.DistError | None:
        """Return the error that another rank reported, as an error of this rank, once; None if
        there is none."""
        with self._lock:
            coming = self._coming
            if coming is None or not coming.is_completed():
                return None
            self._coming = None
        self.lost = coming.exception()
        if self.lost is not None:
            return None
        said = json.loads(bytes(memoryview(self._failure)))
        kind, text = getattr(errors, said["kind"], None), said["text"]
        if not (isinstance(kind, type) and issubclass(kind, errors.DistError)):
            kind, text = errors.DistBackendError, f"{said['kind']}: {text}".removesuffix(": ")
        return kind(
            f"rank {coming.source_rank()} says: {text}",
            op=said["op"], seq=said["seq"], group=self._host.group_name,
            ranks=tuple(said["ranks"]),  # never the reporting rank, which lives
        )  # fmt: skip
