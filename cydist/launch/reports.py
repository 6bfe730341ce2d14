"""A launcher's part in reports about its ranks: it answers questions, and watches for hangs.

Questions come from commands on any host of the job (all_hosts.py). A report of a hang is what
`cydist hang` prints. One launcher prints it: the only one, or host 0's, whose ranks need not hang.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cydist.launch import run_files
from cydist.launch.options import LaunchOptions
from cydist.launch.processes import die_with

if TYPE_CHECKING:
    from cydist.launch.hang_report import HangWatch
    from cydist.launch.hosts import Launchers
    from cydist.launch.job_counters import JobCounters

_SHORTEST_LOOK = 0.2  # seconds between two looks for hangs
_READ_BYTES = 1 << 16


class Reports:
    """The reports of one launcher about its ranks.

    Args:
        options: Of the launcher.
        files: Directory of what ranks leave for it; "": none.
        selector: Calls the data of what is ready.
        say: Prints a text, in whole lines.
    """

    def __init__(
        self,
        options: LaunchOptions,
        files: str,
        selector: selectors.BaseSelector,
        say: Callable[[str], object],
    ) -> None:
        self._options = options
        self._files = files
        self._selector = selector
        self._say = say
        self._hosts: Launchers | None = None
        self._hangs: HangWatch | None = None
        self._look_at: float | None = None  # when to look for hangs
        self._counters: JobCounters | None = None  # while commands want sums of calls
        self._count_at: float | None = None  # when to look at the calls
        self._count_until = 0.0
        self._report: int | None = None  # a descriptor from which a report of a hang comes

    @property
    def deadline(self) -> float | None:
        """Return when `look_if_due` must be called, on time.monotonic(); None: never."""
        times = (self._look_at, self._count_at)
        return min((each for each in times if each is not None), default=None)

    def look_if_due(self, now: float, running: bool) -> None:
        """Look at the ranks if it is time.

        Args:
            running: Whether the ranks run, and none has failed.
        """
        if self._count_at is not None and self._count_at <= now:
            self._count(now)
        if self._look_at is not None and self._look_at <= now:
            self._look_for_hangs(now, running)

    # Questions

    def take_questions(self, hosts: Launchers) -> None:
        """Let commands ask, here and on other hosts, what all ranks do."""
        self._hosts = hosts
        hosts.look, hosts.take = self._answer, self._take_answer
        hosts.hung, hosts.told = self._begin_report, self._forget_hangs
        questions = run_files.open_questions(self._files)
        if questions is not None:
            self._selector.register(
                questions, selectors.EVENT_READ, lambda: self._pass_questions_on(hosts, questions)
            )

    def _pass_questions_on(self, hosts: Launchers, questions: int) -> None:
        from cydist.launch.all_hosts import questions_in  # loads compiled code

        with contextlib.suppress(BlockingIOError):
            for key, question in questions_in(os.read(questions, _READ_BYTES)):
                hosts.ask(key, question)

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return what the ranks of this host do, for another host. Their output waits meanwhile."""
        from cydist.launch.hosts import MOST_BYTES

        try:
            from cydist.launch.all_hosts import answer_of
        except ImportError as error:  # the compiled code is of another Python
            return {"error": f"its launcher cannot look: {error}"}
        if question["counts"] and self._files:
            self._keep_counting(question["counts"])
        return answer_of(self._files, question, MOST_BYTES // 2, self._counters)

    def _take_answer(self, key: str, node: int, answer: dict[str, Any]) -> None:
        from cydist.launch.all_hosts import take_answer

        take_answer(self._files, key, node, answer)

    # Sums of calls

    def _keep_counting(self, seconds: float) -> None:
        """Count the calls of the ranks for so long, since busy ranks soon overwrite them."""
        from cydist.launch.job_counters import JobCounters

        if self._counters is None:
            self._counters = JobCounters(self._files)
        now = time.monotonic()
        self._count_until = max(self._count_until, now + seconds)
        self._count(now)

    def _count(self, now: float) -> None:
        assert self._counters is not None
        if now >= self._count_until:
            self._counters = self._count_at = None
        else:
            self._count_at = now + self._counters.look()

    # Hangs

    def watch_for_hangs(self) -> None:
        """Report calls of the ranks that have just started, if they take too long."""
        if self._limit and self._files:
            from cydist.launch.hang_report import HangWatch  # most jobs need none

            self._hangs = HangWatch(self._limit)
            self._look_at = time.monotonic()

    def stop(self) -> None:
        """Report no hangs any more, since ranks end."""
        self._look_at = None
        if self._report is not None:
            self._selector.unregister(self._report)
            os.close(self._report)
            self._report = None

    @property
    def _limit(self) -> float:
        """Return the user's limit, as given to this launcher, or to host 0's."""
        theirs = 0.0 if self._hosts is None else self._hosts.report_hangs
        return self._options.report_hangs or theirs

    def _look_for_hangs(self, now: float, running: bool) -> None:
        assert self._hangs is not None
        self._look_at = now + max(_SHORTEST_LOOK, self._limit / 4)
        if running and self._hangs.hung(self._files):
            if self._hosts is None:
                self._begin_report(self._limit)
            else:
                self._hosts.report_hang(self._limit)

    def _forget_hangs(self) -> None:
        """Pass over the calls of this moment: host 0 reports them."""
        if self._hangs is not None:
            self._hangs.pass_over(self._files)

    def _begin_report(self, seconds: float) -> None:
        """Start a process that makes a report, and print that when it comes. Other hosts that find
        the same hang meanwhile get no report of their own."""
        if self._report is not None or not self._files:
            return
        parent = os.getpid()
        read, write = os.pipe()
        try:
            subprocess.Popen(
                [sys.executable, "-m", "cydist", "hang", self._files], stdin=subprocess.DEVNULL,
                stdout=write, stderr=write, preexec_fn=lambda: die_with(parent),
            )  # fmt: skip
        except OSError as error:
            os.close(read)
            self._say(f"cydistrun: --report-hangs: {error}\n")
            return
        finally:
            os.close(write)
        text = bytearray()

        def take() -> None:
            if data := os.read(read, _READ_BYTES):
                text.extend(data)
                return
            self._selector.unregister(read)
            os.close(read)
            self._report = None
            if text:
                head = f"cydistrun: a call takes longer than {seconds:g} s (--report-hangs):\n"
                self._say(head + text.decode(errors="replace"))

        self._report = read
        self._selector.register(read, selectors.EVENT_READ, take)
