"""The driver's side of a worker: send commands to its ranks, and receive their answers."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any

from cydist.bench import spawn
from cydist.bench.spawn import Spec
from cydist.launch.processes import pretty_exit

Answer = dict[str, Any]

END_SECONDS = 10.0
# Seconds that the other ranks have to refuse a command after one has refused it.
GRACE_SECONDS = 5.0
LOOK_SECONDS = 0.05  # between checks that processes that should connect still run


class WorkerError(Exception):
    """A worker did not execute a command; `lost`: it is gone, or out of step."""

    def __init__(self, text: str, lost: bool) -> None:
        super().__init__(text)
        self.lost = lost


class Worker:
    """A library on `size` ranks that wait for commands.

    Args:
        directory: For its socket and its log.
        timeout: Seconds for its start, and for each command.

    Raises WorkerError when it cannot be started, with the end of what it printed.
    """

    def __init__(self, spec: Spec, size: int, directory: str, timeout: float) -> None:
        self.name = spec.name
        self.about: dict[str, str] = {}
        self._size = size
        self._timeout = timeout
        self._log = os.path.join(directory, f"{spec.name}.log")
        self._ranks: list[tuple[socket.socket, IO[bytes]]] = []  # and a file to read lines from
        address = os.path.join(directory, f"{spec.name}.sock")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(size)
            try:
                self._processes = spawn.start(spec, size, address, self._log)
            except OSError as error:
                raise self._failure(f"cannot be started: {error}") from None
            try:
                self._meet(listener)
            except BaseException:
                self.close(0.0)
                raise

    def _meet(self, listener: socket.socket) -> None:
        """Wait for every rank, and sort them."""
        deadline = time.monotonic() + self._timeout
        listener.settimeout(LOOK_SECONDS)
        while len(self._ranks) < self._size:
            ended = self._processes.status()  # first: an ended process cannot connect later
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if ended is not None:
                    raise self._failure(
                        f"cannot be started: ended with {pretty_exit(ended)}"
                    ) from None
                if time.monotonic() > deadline:
                    raise self._failure(f"did not start in {self._timeout:g} s") from None
                continue
            connection.settimeout(self._timeout)
            self._ranks.append((connection, connection.makefile("rb")))
        hellos = self._answers(deadline)
        if sizes := {hello["size"] for hello in hellos} - {self._size}:
            raise self._failure(
                f"a rank of {self._size} thinks that it is one of {min(sizes)}: "
                "mpirun belongs to another MPI than mpi4py"
            )
        numbers = [int(hello["rank"]) for hello in hellos]
        self._ranks = [self._ranks[numbers.index(rank)] for rank in range(self._size)]
        self.about = hellos[numbers.index(0)]["about"]

    def command(self, command: Answer) -> list[Answer]:
        """Send a command to every rank, and return their answers by rank.

        Raises WorkerError. Either every rank refused, and all are ready for another command; or
        some rank is gone, late, or refused alone, and the worker is lost.
        """
        line = json.dumps(command).encode() + b"\n"
        try:
            for rank, _ in self._ranks:
                rank.sendall(line)
        except OSError:
            raise self._failure("a rank is gone") from None
        return self._answers(time.monotonic() + self._timeout)

    def _answers(self, deadline: float) -> list[Answer]:
        """Return one line of every rank."""
        answers: dict[int, Answer] = {}
        refused = ""
        with selectors.DefaultSelector() as selector:
            for number, (rank, _) in enumerate(self._ranks):
                selector.register(rank, selectors.EVENT_READ, number)
            while len(answers) < self._size:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    silent = sorted(set(range(self._size)) - answers.keys())
                    raise self._failure(refused or f"no answer of ranks {silent} in time")
                for key, _ in ready:
                    selector.unregister(key.fileobj)
                    answer = answers[key.data] = self._answer(key.data, refused)
                    if "error" in answer and not refused:
                        refused = f"rank {key.data}: {answer['error']}"
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if refused:
            if not all("error" in answer for answer in answers.values()):
                raise self._failure(refused)
            raise WorkerError(f"{self.name}: {refused}", lost=False)
        return [answers[rank] for rank in range(self._size)]

    def _answer(self, number: int, refused: str) -> Answer:
        try:
            line = self._ranks[number][1].readline()
        except OSError:
            line = b""
        if not line:
            raise self._failure(refused or f"rank {number} is gone")
        answer: Answer = json.loads(line)
        return answer

    def _failure(self, what: str) -> WorkerError:
        """Return the error of a lost worker, with its last output, which may tell the cause."""
        try:
            with open(self._log, "rb") as file:
                said = file.read().decode(errors="replace").strip().splitlines()[-8:]
        except OSError:
            said = []
        text = "".join(f"\n    {line}" for line in said)
        return WorkerError(f"{self.name}: {what}{text}", lost=True)

    def close(self, seconds: float = END_SECONDS) -> None:
        """End its ranks, which may take `seconds`."""
        for rank, lines in self._ranks:
            with contextlib.suppress(OSError):
                rank.sendall(b'{"do": "close"}\n')
            lines.close()
            rank.close()
        self._ranks.clear()
        self._processes.end(seconds)


@contextlib.contextmanager
def started_workers(specs: Sequence[Spec], size: int, timeout: float) -> Iterator[list[Worker]]:
    """Start the workers that can be started, on `size` ranks each. For the others, print the reason
    on stderr.

    Raises WorkerError if the first one cannot be started.
    """
    with contextlib.ExitStack() as stack:
        running: list[Worker] = []
        for spec in specs:
            # Not in TMPDIR, since the path of a socket must be short.
            place = tempfile.TemporaryDirectory(prefix="cydist-bench-", dir="/tmp")
            directory = stack.enter_context(place)
            try:
                worker = Worker(spec, size, directory, timeout)
            except WorkerError as error:
                if not running:
                    raise
                print(error, file=sys.stderr, flush=True)
                continue
            stack.callback(worker.close)
            running.append(worker)
        yield running
