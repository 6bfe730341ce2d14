"""One worker: its start, its signals, and its end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Mapping

from cydist import config
from cydist.launch.environment import Generation, secret_pipe, worker_environment
from cydist.launch.options import STREAMS, LaunchOptions
from cydist.launch.output import Lines, LogFile, Tail
from cydist.launch.processes import die_with
from cydist.net.secret import descriptor_text

# A large pipe lets a worker go on while the launcher is busy.
_PIPE_BYTES = 1 << 18


class Worker:
    """A process of the job, leader of its own session and process group.

    Attributes:
        pipes: {stream: the launcher's end}, for streams that pass through the launcher.
        logs: {stream: file}; written by the worker itself if the stream is not in `pipes`.
        tail: The end of its stderr, if that goes through a pipe.
        errors: The lines of its stderr on the console; None: they are not shown.
        told: Whether the launcher told it to end; its end is then not its own failure.
        code: Its exit status as subprocess gives it, None while it runs.
        ended: Time of its end, on the launcher's clock.
    """

    def __init__(self, local_rank: int, rank: int) -> None:
        self.local_rank = local_rank
        self.rank = rank
        self.pid = 0
        self.pipes: dict[int, int] = {}
        self.logs: dict[int, LogFile] = {}
        self.tail = Tail()
        self.errors: Lines | None = None
        self.error_file = ""
        self.told = False
        self.code: int | None = None
        self.ended = 0.0

    @property
    def running(self) -> bool:
        return self.pid != 0 and self.code is None

    def start(
        self,
        options: LaunchOptions,
        generation: Generation,
        inherited: Mapping[str, str],
        directory: str,
    ) -> None:
        """Start it, with its error file in `directory`, or none if that is "". Raises OSError if
        it cannot be started."""
        variables = worker_environment(options, generation, self.local_rank, inherited)
        # An empty one counts as unset, so that the rank does not write into that of an outer job.
        self.error_file = directory and os.path.join(directory, f"error-{self.local_rank}.json")
        variables.update(dict.fromkeys(config.ERROR_FILE.names, self.error_file))
        if directory:
            variables[config.RUN_FILES.names[0]] = directory
        with contextlib.ExitStack() as stack:
            passed = []
            if generation.secret is not None:
                fd = secret_pipe(generation.secret)
                stack.callback(os.close, fd)
                variables[config.SECRET_FD.names[0]] = descriptor_text(fd)
                passed.append(fd)
            if generation.ports is not None and self.rank == 0:
                _, store, reserved = generation.ports
                variables[config.STORE_FD.names[0]] = str(store.fileno())
                passed += [each.fileno() for each in (store, reserved) if each is not None]
            ends = {stream: self._stream(stream, options, stack) for stream in STREAMS}
            launcher = os.getpid()
            process = subprocess.Popen(
                self._command(options),
                # Only one process can read the terminal, so rank 0 does (for a debugger's prompt).
                stdin=None if self.local_rank == 0 else subprocess.DEVNULL,
                stdout=ends[1],
                stderr=ends[2],
                env=variables,
                pass_fds=passed,
                start_new_session=True,
                # Safe here: this process has one thread. The kernel ties a child's death to
                # the thread that started it, and that thread is the launcher's only one.
                preexec_fn=lambda: die_with(launcher),
            )
        self.pid = process.pid
        process.returncode = 0  # the launcher reaps it, like every other ended process

    def _command(self, options: LaunchOptions) -> list[str]:
        command = [*options.command]
        if options.pass_local_rank:
            command.insert(1, f"--local-rank={self.local_rank}")
        if options.is_module:
            return [sys.executable, "-u", "-m", *command]
        # -u: output of a killed worker must not be lost in its buffer.
        return [sys.executable, "-u", *command] if options.is_script else command

    def _stream(self, stream: int, options: LaunchOptions, stack: contextlib.ExitStack) -> int:
        """Return the descriptor that the worker gets as `stream`: its log file, or a pipe to the
        launcher."""
        rank = self.local_rank
        if options.redirects.get(rank, 0) & ~options.tee.get(rank, 0) & stream:
            return self.logs[stream].fd
        ours, theirs = os.pipe()
        stack.callback(os.close, theirs)
        os.set_blocking(ours, False)
        with contextlib.suppress(OSError):
            fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self.pipes[stream] = ours
        return theirs

    def send(self, number: int) -> None:
        """Signal its whole process group."""
        if self.running:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, number)

    def end(self, number: int) -> None:
        """Tell its whole process group to end. Stopped processes are continued, so that they
        receive it."""
        if self.running:
            self.told = True
            self.send(number)
            self.send(signal.SIGCONT)

    @property
    def held(self) -> list[str]:
        """Return the lines of a traceback that were not shown yet, by which it may have ended."""
        lines = [] if self.errors is None else self.errors.held
        return [line.decode(errors="replace") for line in lines]

    @property
    def shown(self) -> bool:
        """Return whether its last traceback was shown while it seemed to go on."""
        return self.errors is not None and self.errors.shown

    def last_output(self) -> bytes:
        """Return the end of its stderr, from its pipe or its log file."""
        log = self.logs.get(2)
        return log.end() if log is not None else self.tail.bytes()

    def close(self) -> None:
        """Close its log files. The reader of its pipes closes those."""
        for log in self.logs.values():
            log.close()
