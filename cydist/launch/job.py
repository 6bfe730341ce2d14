"""The inner process: starts the workers, passes on their output, decides how the job ended.

It uses one thread and one selector. It polls nothing, and waits without a deadline only for the
workers themselves. The stages of one generation of workers:

    running -> settling -> reported -> stopping -> killing -> (all ended) -> sweeping
       |          a worker failed            grace over                 what they left behind
       +-> all ended well

Only a job over several hosts has the stage `reported`, in which host 0's launcher decides which
rank failed first (hosts.py). Its decision ends the ranks of all hosts.
"""

from __future__ import annotations

import contextlib
import enum
import os
import re
import selectors
import signal
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from cydist import config
from cydist.errors import RendezvousError, counted, listed
from cydist.launch import run_files
from cydist.launch.environment import new_generation
from cydist.launch.failures import (
    about_to_fail,
    account,
    aftermath,
    blames_another,
    failed_at,
    first_failure,
    remove_files,
)
from cydist.launch.options import STREAMS, LaunchOptions
from cydist.launch.output import Lines, LogFile, OutputStream, OutputStreams
from cydist.launch.processes import (
    exit_code,
    kill_descendants,
    pretty_exit,
    signal_descendants,
)
from cydist.launch.reports import Reports
from cydist.launch.supervisor import FINAL_WAIT_SECONDS, ignore_signal
from cydist.launch.workers import Worker
from cydist.waiting import LONGEST_WAIT, LoopGuard, duration

if TYPE_CHECKING:
    from cydist.launch.hosts import Launchers, Verdict

# A worker that has just printed a traceback may take this long to end, so that the launcher's
# signal does not hide its exit code.
SETTLE_SECONDS = 1.0
# Processes that workers left behind may take this long to end.
SWEEP_SECONDS = 1.0
# Host 0's launcher decides within a second. If it does not, this host's ranks end all the same.
REPORTED_SECONDS = 3.0
MOST_WORDS = 1 << 16  # characters of a rank's last words that other hosts show


class JobStage(enum.Enum):
    """The stages of one generation of workers."""

    RUNNING = enum.auto()
    SETTLING = enum.auto()
    REPORTED = enum.auto()
    STOPPING = enum.auto()
    KILLING = enum.auto()
    SWEEPING = enum.auto()


class Job:
    """All workers of this host, from the first start to the last end.

    Args:
        files: Directory of what ranks leave for the launcher; "": none.
        secret: That all hosts of the job were given; None: each has it in a file.
        on_start: Called when the first workers are about to start.
    """

    def __init__(
        self,
        options: LaunchOptions,
        files: str,
        secret: bytes | None = None,
        on_start: Callable[[], object] = lambda: None,
    ) -> None:
        self.options = options
        self._files = files  # directory of what ranks leave for the launcher
        self._secret = secret
        self._on_start = on_start
        self.stopped_by: int | None = None  # the first signal that the launcher received
        self.abandoned = False  # the outer process is dead
        self._workers: list[Worker] = []
        self._stage = JobStage.RUNNING
        self._deadline: float | None = None
        self._now = time.monotonic()
        self._first: Worker | None = None
        self._said = ""  # the account of its failure, once that is printed
        self._told_of: Worker | None = None  # the failure that the other launchers know
        self._hosts: Launchers | None = None  # of a job over several hosts
        self._not_met: RendezvousError | None = None  # why the launchers do not meet
        self._selector = selectors.DefaultSelector()
        self._output = OutputStreams(self._selector)
        self._loop_guard = LoopGuard("cydistrun", self._print)
        self._logs = ""
        self._reports = Reports(options, files, self._selector, self._print)

    def run(self, lifeline: int) -> int:
        """Run the job to its end, and return the exit code. Signals arrive through `lifeline`, see
        supervisor.py."""
        wake, wake_write = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(wake_write, False)
        signal.signal(signal.SIGCHLD, ignore_signal)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self._register(lifeline, lambda: self._on_lifeline(lifeline))
        self._register(wake, lambda: self._reap(wake))
        try:
            self._logs = self._log_directory()
            if self.options.nodes > 1:
                from cydist.launch import hosts  # slow to import, and one host needs none

                self._hosts = hosts.other_launchers(self.options, self._print, self._secret)
                self._register(self._hosts.fileno(), self._serve_hosts)
                self._reports.take_questions(self._hosts)
            return self._run_generations()
        except (OSError, RendezvousError) as error:
            self._print(f"cydistrun: {error}\n")
            return 1
        finally:
            if self._hosts is not None:
                self._selector.unregister(self._hosts.fileno())
                self._hosts.close()
            left = kill_descendants(FINAL_WAIT_SECONDS)
            remove_files(self._files)
            if not self.abandoned:
                if left:
                    self._print(f"cydistrun: cannot be killed: {', '.join(map(str, left))}\n")
                # All workers are gone, so a pager may take its time, as with any program.
                told = self.stopped_by is not None
                self._output.drain(lifeline, self.options.grace if told else None)

    def _run_generations(self) -> int:
        if self._hosts is not None:
            return self._run_with_others(self._hosts)
        for number in range(self.options.max_restarts + 1):
            self._run_generation(number, (self.options.local_size,))
            if self.abandoned or self.stopped_by is not None:
                break
            if self._first is None:
                self._release()
                return 0
            said = self._report_first()
            self._print(aftermath(self._first, self._workers, said))
            for worker in self._workers:
                worker.close()
            if number < self.options.max_restarts:
                self._print(
                    f"cydistrun: starting {counted(self.options.local_size, 'rank')} again "
                    f"(restart {number + 1} of {self.options.max_restarts})\n"
                )
                self._pause(self.options.restart_delay)
                if self.abandoned or self.stopped_by is not None:
                    break
        if (code := self._interrupted()) is not None:
            self._release()
            return code
        assert self._first is not None
        assert self._first.code is not None
        return exit_code(self._first.code)

    def _report_first(self) -> str:
        """Print the account of the first failure, once; return it."""
        assert self._first is not None
        if not self._said:
            self._said = account(self._first)
            self._print(self._said)
        return self._said

    def _release(self) -> None:
        """Print the tracebacks that are held, but for one that was shown."""
        for worker in self._workers:
            if worker.errors is not None and not (self._said and worker is self._first):
                worker.errors.release()

    def _interrupted(self) -> int | None:
        """Return the exit code if a signal or the death of the outer process ended the job."""
        if self.abandoned:
            return exit_code(-signal.SIGKILL)
        return None if self.stopped_by is None else exit_code(-self.stopped_by)

    def _run_with_others(self, hosts: Launchers) -> int:
        """Run this host's part of a job over several hosts. Host 0's launcher orders each start."""
        number = 0
        while True:
            self._await_order(hosts, number)
            if self._interrupted() is None and hosts.started == number:
                self._told_of = None
                self._run_generation(number, hosts.sizes)
                self._tell_outcome(hosts)
            if (code := self._interrupted()) is not None:
                self._release()
                return code
            if hosts.finished:
                self._release()
                return 0
            assert hosts.verdict is not None
            self._report_verdict(hosts.verdict)
            if not hosts.verdict.restart:
                return hosts.verdict.code
            number += 1
            if self.options.speaks:
                self._print(
                    f"cydistrun: starting {sum(hosts.sizes)} ranks of {self.options.nodes} "
                    f"hosts again (restart {number} of {self.options.max_restarts})\n"
                )
            hosts.tell("ended")

    def _await_order(self, hosts: Launchers, number: int) -> None:
        """Wait until generation `number` may start, or must not any more.

        Raises RendezvousError if the launchers do not meet.
        """

        def ordered() -> bool:
            over = hosts.verdict is not None and not hosts.verdict.restart
            return hosts.started == number or over or self._not_met is not None

        self._stage, self._deadline = JobStage.SWEEPING, None
        self._loop(lambda: self._interrupted() is not None or ordered())
        if self._not_met is not None:
            raise self._not_met

    def _tell_outcome(self, hosts: Launchers) -> None:
        """Tell how this host's ranks ended, and wait until those of all hosts have."""
        if self._interrupted() is not None:
            return
        if self._first is None:
            hosts.tell("done")
        else:
            self._tell_failure(hosts)
        self._stage, self._deadline = JobStage.SWEEPING, None
        self._loop(
            lambda: self._interrupted() is not None or hosts.finished or hosts.verdict is not None
        )

    def _tell_failure(self, hosts: Launchers) -> None:
        """Tell the other launchers which rank of this host failed first, once."""
        if self._first is None or self._told_of is not None:
            return
        self._told_of = self._first
        assert self._first.code is not None
        hosts.tell(
            "failed",
            rank=self._first.rank,
            code=exit_code(self._first.code),
            text=account(self._first, whole=True)[-MOST_WORDS:],
            secondary=blames_another(self._first),
            ago=time.monotonic() - failed_at(self._first),
        )

    def _report_verdict(self, verdict: Verdict) -> None:
        ours = self._told_of if verdict.node == self.options.node_rank else None
        if ours is not None and ours.rank != verdict.rank:
            ours = None
        said = verdict.text if ours is None else account(ours)
        if self.options.speaks:
            self._print(said)
        self._print(aftermath(ours, self._workers, said))
        for worker in self._workers:
            worker.close()

    def _serve_hosts(self) -> None:
        assert self._hosts is not None
        try:
            self._hosts.serve()
        except RendezvousError as error:
            self._not_met = error  # of a running loop, which goes on after exceptions

    def _run_generation(self, number: int, sizes: tuple[int, ...]) -> None:
        """Start all workers, and return when they and all their descendants have ended."""
        self._stage, self._deadline, self._first = JobStage.RUNNING, None, None
        self._said = ""
        if number == 0:
            self._on_start()
        run_files.remove_rings(self._files)
        generation = new_generation(self.options, number, sizes, self._secret)
        inherited = dict(os.environ)
        first_rank = generation.first_rank(self.options.node_rank)
        self._workers = [
            Worker(local_rank, first_rank + local_rank)
            for local_rank in range(self.options.local_size)
        ]
        try:
            for worker in self._workers:
                self._open_logs(worker, number)
                try:
                    worker.start(self.options, generation, inherited, self._files)
                finally:
                    self._watch(worker)
        finally:
            generation.close()
        pids = {worker.rank: worker.pid for worker in self._workers}
        run_files.write_job(self._files, self.options, sum(sizes), pids)
        self._reports.watch_for_hangs()
        self._serve_metrics()
        self._loop(lambda: self._stage is JobStage.SWEEPING)
        self._reports.stop()
        self._write_dumps()
        self._loop(lambda: not signal_descendants(0))
        kill_descendants(FINAL_WAIT_SECONDS)
        self._output.finish()

    # Watching.

    def _loop(self, done: Callable[[], bool]) -> None:
        """Handle events until `done()`, the outer process dies, or the stage's time is over."""
        while not self.abandoned:
            with self._loop_guard:
                self._advance()  # first, since a round that raised may have skipped it
                if done():
                    return
                self._round()
                if self._stage is JobStage.SWEEPING and self._over():
                    return

    def _round(self) -> None:
        """Wait until something happens or must happen, and handle it."""
        others = None if self._hosts is None else self._hosts.deadline
        ends = (
            self._now + LONGEST_WAIT, self._deadline, self._output.hold_back(), others,
            self._reports.deadline,
        )  # fmt: skip
        first = min(end for end in ends if end is not None)
        events = self._selector.select(max(0.0, first - self._now))
        self._now = time.monotonic()
        if others is not None and others <= self._now:
            self._serve_hosts()
        self._reports.look_if_due(self._now, self._stage is JobStage.RUNNING)
        # Ends come before output, since other workers' messages about an end come after it.
        for key, _ in sorted(events, key=lambda event: event[0].fd in self._output):
            try:
                key.data()
            except Exception as error:
                self._loop_guard.record(error)  # other workers do not wait for this one

    def _over(self) -> bool:
        return self._deadline is not None and self._now >= self._deadline

    def _advance(self) -> None:
        """Go to the next stage when it is time."""
        if self._stage is JobStage.SWEEPING:
            return
        if not any(worker.running for worker in self._workers):
            self._choose()
            self._enter(JobStage.SWEEPING, SWEEP_SECONDS)
            signal_descendants(signal.SIGTERM)
        elif (
            self._stage is JobStage.RUNNING
            and not self.options.keep_going
            and any(worker.code for worker in self._workers)
        ):
            self._enter(JobStage.SETTLING, SETTLE_SECONDS)
        if self._stage is JobStage.SETTLING and (
            self._over() or not any(about_to_fail(worker, self._now) for worker in self._workers)
        ):
            self._choose()
            if self._hosts is None:
                self._report_first()
                self._stop(signal.SIGTERM)
            else:
                self._enter(JobStage.REPORTED, REPORTED_SECONDS)
                self._tell_failure(self._hosts)
        verdict = None if self._hosts is None else self._hosts.verdict
        if self._stage in (JobStage.RUNNING, JobStage.SETTLING, JobStage.REPORTED) and (
            verdict is not None or (self._stage is JobStage.REPORTED and self._over())
        ):
            self._choose()
            self._stop(signal.SIGTERM if verdict is None else verdict.ended_by)
        if self._stage is JobStage.STOPPING and self._over():
            late = [worker.rank for worker in self._workers if worker.running]
            self._print(
                f"cydistrun: {listed('rank', late)} did not end within {self.options.grace:g} s: "
                "killed\n"
            )
            self._kill()
        if self._stage is JobStage.KILLING and self._over():
            # SIGKILL did not end them: they are in an uninterruptible wait. The final report lists
            # their pids.
            self._enter(JobStage.SWEEPING, 0.0)

    def _enter(self, stage: JobStage, seconds: float) -> None:
        self._stage = stage
        self._deadline = time.monotonic() + duration(seconds)

    def _choose(self) -> None:
        """Decide which worker failed first, if that is not decided yet."""
        for worker in self._workers:
            if worker.code and 2 in worker.pipes:
                self._output.read_all(worker.pipes[2])
        self._first = self._first or first_failure(self._workers)

    def _stop(self, number: int) -> None:
        """Send signal `number` to every worker's process group, and start the grace period."""
        self._enter(JobStage.STOPPING, self.options.grace)
        for worker in self._workers:
            worker.end(number)

    def _kill(self) -> None:
        self._enter(JobStage.KILLING, FINAL_WAIT_SECONDS)
        for worker in self._workers:
            worker.end(signal.SIGKILL)

    def _on_lifeline(self, lifeline: int) -> None:
        """Handle the signals that the outer process forwards, or its death."""
        numbers = os.read(lifeline, 4096)
        if not numbers:
            self.abandoned = True
            self._selector.unregister(lifeline)
        for number in numbers:
            if number in (signal.SIGTSTP, signal.SIGCONT):
                for worker in self._workers:
                    # Not SIGTSTP: it does nothing to processes without a terminal.
                    worker.send(signal.SIGSTOP if number == signal.SIGTSTP else signal.SIGCONT)
            elif self._stage in (JobStage.RUNNING, JobStage.SETTLING, JobStage.REPORTED):
                self._print(f"cydistrun: {signal.Signals(number).name}: ending all ranks\n")
                if self._stage is JobStage.RUNNING:
                    self._take_stop(number)
                self._choose()
                self._stop(number)
            elif self._stage is JobStage.STOPPING and number == signal.SIGINT:
                verdict = None if self._hosts is None else self._hosts.verdict
                if self.stopped_by is None and verdict is not None and verdict.ended_by == number:
                    self.stopped_by = number  # one Ctrl-C, of which another host told first
                else:
                    self._kill()
            elif self._stage is JobStage.SWEEPING and self.stopped_by is None:
                self._take_stop(number)

    def _take_stop(self, number: int) -> None:
        """Note the signal that ends the job, on all hosts."""
        self.stopped_by = number
        if self._hosts is not None:
            name = signal.Signals(number).name
            self._hosts.tell("stopped", code=exit_code(-number), signal=name)

    def _reap(self, wake: int) -> None:
        """Take the exit status of every child that ended: workers and their orphans."""
        with contextlib.suppress(BlockingIOError):
            os.read(wake, 4096)
        running = {worker.pid: worker for worker in self._workers if worker.running}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if (worker := running.get(pid)) is not None:
                worker.code = os.waitstatus_to_exitcode(status)
                worker.ended = self._now
                if worker.errors is not None:
                    if worker.code == 0 and not worker.told:
                        worker.errors.stop_holding()  # its traceback was only logged
                    worker.errors.process_ended()
                if worker.code and not worker.told and self.options.keep_going:
                    how = pretty_exit(worker.code)
                    self._print(f"cydistrun: rank {worker.rank} {how}; the others go on\n")
                    if worker.errors is not None:
                        worker.errors.stop_holding()

    # What the ranks leave about their calls.

    def _serve_metrics(self) -> None:
        """Start a process that serves metrics, if the user wants them. It ends with the ranks."""
        listen = config.METRICS.get()
        if not listen or not self._files:
            return
        from cydist.launch.metrics import start_for_job  # most jobs need none

        try:
            start_for_job(self._files, listen)
        except OSError as error:
            self._print(f"cydistrun: CYDIST_METRICS: {error}\n")

    def _write_dumps(self) -> None:
        """Write the last calls of all ranks, where the user wants them: a killed one cannot."""
        directory = config.RECORDER.get()
        if not directory or not self._files:
            return
        from cydist.launch import rank_records  # loads compiled code

        try:
            ranks = rank_records.read_ranks(rank_records.read_job(self._files))
            rank_records.write_dumps(ranks, directory)
        except (OSError, ValueError) as error:
            self._print(f"cydistrun: CYDIST_RECORDER: {error}\n")

    def _pause(self, seconds: float) -> None:
        """Wait before a restart; a signal ends it."""
        self._enter(JobStage.SWEEPING, seconds)
        self._loop(lambda: self.stopped_by is not None)

    # Output.

    def _watch(self, worker: Worker) -> None:
        """Start reading from the worker's pipes."""
        shown = self.options.shown is None or worker.local_rank in self.options.shown
        for stream, fd in worker.pipes.items():
            console = self._output.consoles[stream]
            sinks: list[Callable[[bytes], None]] = []
            if stream in worker.logs:
                sinks.append(worker.logs[stream].write)
            if stream == 2:
                sinks.append(lambda data: worker.tail.add(data, self._now))
            prefix = console.prefix(worker.rank) if self.options.prefix else b""
            holds = stream == 2 and config.TRACEBACK.get().strip().lower() != "full"
            lines = Lines(prefix, console, holds=holds) if shown else None
            if stream == 2:
                worker.errors = lines
            logged = stream in worker.logs
            self._output.add(OutputStream(fd, sinks, lines, console, logged=logged))

    def _register(self, fd: int, handler: Callable[[], object]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, handler)

    def _print(self, text: str) -> None:
        if self.options.label:
            own = f"cydistrun on {self.options.label}: "
            text = re.sub("^cydistrun: ", lambda _: own, text, flags=re.MULTILINE)
        self._output.print(text)

    def _log_directory(self) -> str:
        """Return the directory of this run's log files, made on demand."""
        if not (self.options.redirects or self.options.tee):
            return ""
        if self.options.log_dir:
            os.makedirs(self.options.log_dir, exist_ok=True)
        safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in self.options.run_id)
        logs = tempfile.mkdtemp(prefix=f"{safe}_", dir=self.options.log_dir or None)
        if not self.options.log_dir:
            self._print(f"cydistrun: logs are in {logs}\n")
        return logs

    def _open_logs(self, worker: Worker, number: int) -> None:
        """Create the log files of `worker`: LOGS/attempt_0/2/stderr.log."""
        rank = worker.local_rank
        wanted = self.options.redirects.get(rank, 0) | self.options.tee.get(rank, 0)
        directory = os.path.join(self._logs, f"attempt_{number}", str(rank))
        for stream, name in STREAMS.items():
            if wanted & stream:
                for folder in (os.path.dirname(directory), directory):
                    os.makedirs(folder, mode=0o700, exist_ok=True)
                worker.logs[stream] = LogFile(os.path.join(directory, f"{name}.log"))


def run_job(
    options: LaunchOptions,
    lifeline: int,
    files: str,
    secret: bytes | None = None,
    on_start: Callable[[], object] = lambda: None,
) -> int:
    """Run a job below this process, with its files in the directory `files` ("": without), and
    return the exit code; see Job."""
    return Job(options, files, secret, on_start).run(lifeline)
