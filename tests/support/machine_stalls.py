"""The times in which the machine ran nothing, as virtual machines do now and then.

Its clock goes on meanwhile, and its kernel neither sends nor repeats a packet. A thread that wakes
up late shows them. So does a process that gets no core, but for less than half a second.
"""

from __future__ import annotations

import threading
import time

TICK = 0.1
STALL = 0.5
DEADLINE = 20.0


class MachineStalls:
    """Notes them while it is entered."""

    def __init__(self) -> None:
        self.found: list[tuple[float, float]] = []  # begin and end, by time.monotonic()
        self._last = 0.0
        self._ended = threading.Event()
        self._noted = threading.Condition()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def awake(self, now: float) -> None:
        """Note that the machine runs."""
        with self._noted:
            if self._last and now - self._last > STALL:
                self.found.append((self._last, now))
            self._last = now
            self._noted.notify_all()

    def seconds(self, begin: float, end: float) -> float:
        """Return how long it ran nothing in that time, of which all has passed."""
        with self._noted:
            assert self._noted.wait_for(lambda: self._last >= end, DEADLINE)
            return sum(max(0.0, min(b, end) - max(a, begin)) for a, b in self.found)

    def _watch(self) -> None:
        while not self._ended.wait(TICK):
            self.awake(time.monotonic())

    def __enter__(self) -> MachineStalls:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended.set()
        self._thread.join()
