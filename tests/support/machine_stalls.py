"""Seconds in which the machine ran nothing, as virtual machines do now and then.

Its clock goes on meanwhile, and its kernel neither sends nor repeats a packet.
"""

from __future__ import annotations

import threading
import time

TICK = 0.1
STALL = 0.5  # a busy machine is late by less


class MachineStalls:
    """Counts them while it is entered."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._count, daemon=True)

    def _count(self) -> None:
        last = time.monotonic()
        while not self._ended.wait(TICK):
            now = time.monotonic()
            if now - last > STALL:
                self.seconds += now - last
            last = now

    def __enter__(self) -> MachineStalls:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended.set()
        self._thread.join()
