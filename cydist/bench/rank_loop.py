"""The timed loop, and a rank's handling of the driver's commands."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise, repeat
from typing import Any

import numpy as np

from cydist.bench.buffers import Buffers
from cydist.bench.peers import Bound, Library

CHECKED_CALLS = 2
BARRIERS = 16  # single calls that are checked
PATHS = ("fast", "general")
LONG = 100  # seconds: a call with a timeout of its own takes the general path

Answer = dict[str, Any]


def loop(bound: Bound, iterations: int) -> int:
    """Return the nanoseconds that `iterations` calls take, with nothing between them."""
    function, arguments = bound
    clock = time.perf_counter_ns
    rounds = repeat(None, iterations)
    if len(arguments) == 0:
        start = clock()
        for _ in rounds:
            function()
        return clock() - start
    if len(arguments) == 1:
        (a,) = arguments
        start = clock()
        for _ in rounds:
            function(a)
        return clock() - start
    a, b = arguments
    start = clock()
    for _ in rounds:
        function(a, b)
    return clock() - start


def sampled_loop(bound: Bound, iterations: int) -> list[int]:
    """Return the nanoseconds of each of `iterations` calls, each with some 50 ns for the clock."""
    function, arguments = bound
    clock = time.perf_counter_ns
    marks = [clock()]
    for _ in repeat(None, iterations):
        function(*arguments)
        marks.append(clock())
    return [after - before for before, after in pairwise(marks)]


class Session:
    """One rank, one library; a cell at a time.

    Attributes:
        progress: The library's, if its messages move only while it is called.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._moves_only = getattr(library, "moves_only", False)
        self.progress: Callable[[], object] | None = getattr(library, "progress", None)
        self._buffers: Buffers | None = None
        self._bound: Bound = (library.barrier, ())
        self._settled = False  # whether a loop has run on these arrays
        self._commands: dict[str, Callable[..., Answer]] = {
            "configure": self.configure,
            "crossovers": self.crossovers,
            "case": self.case,
            "round": self.round,
            "overlap": self.overlap,
            "paths": self.paths,
            "memory": self.memory,
        }

    def do(self, command: Answer) -> Answer:
        """Execute a command: {"do": name, and its arguments}."""
        arguments = dict(command)
        return self._commands[arguments.pop("do")](**arguments)

    def configure(self, settings: dict[str, str]) -> Answer:
        """Apply the algorithms and segments of `settings`, named without CYDIST_, to cydist.
        Returns whether it has windows."""
        from cydist.tuning import table as tuning_table

        for name in ("ALGORITHM", "SEGMENT_BYTES"):
            os.environ[f"CYDIST_{name}"] = settings.get(name, "")
        tuning_table.reload()
        return {"windows": bool(getattr(self._library, "windows", False))}

    def crossovers(self, text: str) -> Answer:
        """Use the measured crossovers of this text of a tuning file."""
        from cydist.tuning import file as tuning_file

        tuning_file.use_measured(tuning_file.parse(text))
        return {}

    def case(self, op: str, count: int, dtype: str) -> Answer:
        """Make the arrays, and check some single calls. Returns the errors and the algorithm."""
        library = self._library
        self._buffers, self._settled = None, False
        gc.collect()
        if op == "barrier":
            self._bound = library.bind(op, None, None)
            return self._check_barrier() | {"algorithm": library.algorithm(op, 0)}
        buffers = self._buffers = self._new_buffers(op, count, dtype)
        self._bound = library.bind(op, buffers.send, buffers.recv)
        function, arguments = self._bound
        wrong = 0
        for salt in range(CHECKED_CALLS):
            buffers.fill(salt)
            function(*arguments)
            wrong += 0 if self._moves_only else buffers.wrong(salt)
        nbytes = count * buffers.send.itemsize
        return {"wrong": wrong, "algorithm": library.algorithm(op, nbytes)}

    def _new_buffers(self, op: str, count: int, dtype: str) -> Buffers:
        library = self._library
        empty = getattr(library, "empty", np.empty)
        return Buffers(op, count, dtype, library.rank, library.size, empty)

    def _check_barrier(self) -> Answer:
        """Return when this rank entered and left some barriers; the ranks are late in turn."""
        function, arguments = self._bound
        entered, left = [], []
        for number in range(BARRIERS):
            if number % self._library.size == self._library.rank:
                sum(range(20_000))  # some 200 us: a wrong barrier would let others leave earlier
            entered.append(time.monotonic_ns())
            function(*arguments)
            left.append(time.monotonic_ns())
        return {"wrong": 0, "entered": entered, "left": left}

    def round(self, iterations: int, sampled: bool, checked: bool) -> Answer:
        """Make one more call to warm up, then time `iterations` calls.

        Args:
            sampled: Return each call's time instead of the total.
            checked: Check the result too.
        """
        buffers = self._buffers
        if buffers is not None and (checked or not self._settled):
            buffers.fill_unchanging(CHECKED_CALLS)
            self._settled = True
        function, arguments = self._bound
        self._library.barrier()
        function(*arguments)
        self._library.barrier()
        answer: Answer
        if sampled:
            answer = {"each_ns": sampled_loop(self._bound, iterations)}
        else:
            answer = {"ns": loop(self._bound, iterations)}
        answer["wrong"] = 0
        if checked and buffers is not None and not self._moves_only:
            answer["wrong"] = buffers.wrong(CHECKED_CALLS, settled=True)
        return answer

    def paths(self, iterations: int, turns: int) -> Answer:
        """Return the nanoseconds of the cell's calls by each path, by turn. The paths take
        turns."""
        function, arguments = self._bound
        general = partial(function, timeout=LONG)
        bound: dict[str, Bound] = {"fast": self._bound, "general": (general, arguments)}
        answer: Answer = {path: [] for path in PATHS}
        for _ in range(turns):
            for path in PATHS:
                self._library.barrier()
                answer[path].append(loop(bound[path], iterations))
        return answer

    def overlap(self, units: int) -> Answer:
        """Return the nanoseconds of the cell's all_reduce, of `units` of computing, of both at
        once, and of the all_reduce while this thread sleeps for the time of computing."""
        buffers = self._buffers
        assert buffers is not None
        buffers.fill_unchanging(0)
        self._library.barrier()
        moving = loop(self._bound, 1)
        computing = compute(units)
        both = self._beside(lambda: compute(units))
        asleep = self._beside(lambda: time.sleep(computing / 1e9))
        return {"moving": moving, "computing": computing, "both": both, "asleep": asleep}

    def _beside(self, other: Callable[[], object]) -> int:
        """Return the nanoseconds of another function with an all_reduce in the background."""
        assert self._buffers is not None
        self._library.barrier()
        clock = time.perf_counter_ns
        start = clock()
        wait = self._library.begin(self._buffers.recv)
        other()
        wait()
        return clock() - start

    def memory(self, op: str, count: int, dtype: str) -> Answer:
        """Return the most bytes that this process takes in its first calls, besides the arrays."""
        library = self._library
        buffers = self._new_buffers(op, count, dtype)
        buffers.fill(0)
        function, arguments = library.bind(op, buffers.send, buffers.recv)
        library.barrier()
        before = resident("VmRSS", reset_peak=True)
        for _ in range(3):
            function(*arguments)
        library.barrier()
        return {"extra": max(0, resident("VmHWM") - before)}


_numbers = np.ones(1 << 14, np.float32)  # 64 KiB: stays in a core's cache


def compute(units: int) -> int:
    """Return the nanoseconds of some arithmetic that uses neither the GIL nor memory bandwidth."""
    clock = time.perf_counter_ns
    start = clock()
    for _ in repeat(None, units):
        np.multiply(_numbers, _numbers, _numbers)
    return clock() - start


def resident(field: str, reset_peak: bool = False) -> int:
    """Return the bytes of this process in memory: now (VmRSS), or the maximum since the reset
    (VmHWM)."""
    if reset_peak:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    with open("/proc/self/status") as file:
        found = [line.split()[1] for line in file if line.startswith(f"{field}:")]
    return int(found[0]) << 10
