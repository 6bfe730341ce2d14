"""Subject "job": collectives of a job that a launcher has started, on one host or several.

    torchrun --nnodes 2 --nproc-per-node 4 ... -m cydist.bench job --vs gloo

All participants run in the job's processes and take turns. Rank 0 drives: it sends each command to
all ranks through cydist's own object collectives, and prints the table.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import re
import socket
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import cydist
from cydist.backends.host.addresses import this_host
from cydist.bench import report, sysinfo
from cydist.bench.buffers import dtype_of
from cydist.bench.cases import MORE_OPS, OPS, Case, cases
from cydist.bench.options import SIZES, calls_text, checked, local_parser, size
from cydist.bench.peers import Cydist, Library, Mpi4py, torch_with
from cydist.bench.rank import refusal
from cydist.bench.rank_loop import Session
from cydist.bench.raw_ring import RawRing
from cydist.bench.raw_tcp import RawTcp
from cydist.bench.runner import Measurements, Row, ratio, run_cases
from cydist.bench.workers import WorkerError
from cydist.errors import counted
from cydist.net.interfaces import address_towards

PEERS = ("gloo", "mpi", "raw")
RATE = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?)bit", re.I)
UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
EPILOG = """
Run it as every rank of a job of torchrun, cydistrun, mpirun, srun or another launcher.
Libraries of --vs: gloo (needs torch), mpi (needs mpi4py, and mpirun or srun as the launcher), and
raw: TCP connections that do nothing else: one polled between 2 ranks, the limit of what tcp can
reach; or one for each rank to the next host, where hosts have as many ranks, for the bytes alone.
"host sends" is what the busiest host sends to other hosts for a call, by the counters of its
interfaces without loopback: other programs' bytes count, too.
"""

Answer = dict[str, Any]


def rate(text: str) -> float:
    """Return bits per second of "1gbit" or "100mbit". Raises ValueError."""
    match = RATE.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{text!r} is not a rate: write 100mbit or 1gbit")
    return float(match[1]) * UNITS[match[2].lower()]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; a wrong one ends the program."""
    calls = calls_text("Calls of --ops, by default all_reduce", (*OPS, *MORE_OPS))
    parser = local_parser("job", "Time collectives of the job that runs this.", EPILOG + calls)
    add = parser.add_argument
    add("--ops", default="all_reduce", metavar="OP,...", help="calls to time, see below")
    add("--sizes", default=SIZES, help=f"bytes of a call ({SIZES})")
    add("--dtype", default="float32", help="of the elements, by numpy's or ml_dtypes' name")
    add("--vs", default="", metavar="PEER,...", help="libraries to compare with, see below")
    add("--backend", default="tcp", help="of cydist: tcp (default), mpi, or another")
    add("--rate", metavar="RATE", help="of a host's link, such as 1gbit: show its share")
    given = checked(parser, arguments)
    try:
        given.sizes = [size(text) for text in given.sizes.split(",")]
        given.rate = None if given.rate is None else rate(given.rate)
        dtype_of(given.dtype)
    except ValueError as error:
        parser.error(str(error))
    given.ops = given.ops.split(",")
    given.vs = [name for name in given.vs.split(",") if name]
    for what, chosen, known in (("--ops", given.ops, (*OPS, *MORE_OPS)), ("--vs", given.vs, PEERS)):
        if unknown := [name for name in chosen if name not in known]:
            parser.error(f"{what}: no {unknown[0]!r}; there are {', '.join(known)}")
    return given


def main(arguments: Sequence[str]) -> int:
    """Serve as a rank; on rank 0 print the table. Return 1 if cydist failed or was wrong."""
    given = parse(arguments)
    libraries: dict[str, Library] = {report.OURS: Cydist(given.backend, "numpy")}
    for name in given.vs:
        libraries[name] = _peer(name)
    with driven(libraries) as (running, places):
        return _drive(given, arguments, libraries, running, places) if running else 0


@contextlib.contextmanager
def driven(
    libraries: Mapping[str, Library],
) -> Iterator[tuple[list[JobLibrary], list[str]]]:
    """Let rank 0 drive the libraries of all ranks, and close them.

    Yields the libraries and the host of each rank. On other ranks than 0 it yields no library,
    after they have executed all of rank 0's commands.
    """
    sessions = {name: Session(library) for name, library in libraries.items()}
    places = _of_all(this_host())
    gc.disable()
    if cydist.get_rank() != 0:
        _serve(sessions)
        yield [], places
    else:
        try:
            yield [JobLibrary(name, sessions, places) for name in libraries], places
        except (WorkerError, OSError, SystemExit):
            cydist.broadcast_object_list([None], 0)
            raise
        cydist.broadcast_object_list([None], 0)
    for library in reversed(list(libraries.values())):
        library.close()


def _peer(name: str) -> Library:
    """Start another library on all ranks of the job."""
    if name == "mpi":
        return Mpi4py()
    rank, size = cydist.get_rank(), cydist.get_world_size()
    host = _from_rank_0(os.environ.get("MASTER_ADDR") or socket.gethostname())
    if name == "raw":
        return _raw(rank, size, host)
    place = ""
    if rank == 0:
        with socket.create_server(("", 0)) as free:
            place = f"tcp://{host}:{free.getsockname()[1]}"
    return torch_with(name, init_method=_from_rank_0(place), rank=rank, world_size=size)


def _raw(rank: int, size: int, host: str) -> Library:
    if size == 2:
        return RawTcp(rank, size, _from_rank_0, host)
    places = _of_all(this_host())
    address = host if places[rank] == places[0] else address_towards(host, None)
    return RawRing(rank, places, address, _of_all, cydist.barrier)


def _of_all(thing: Any) -> list[Any]:
    things: list[Any] = [None] * cydist.get_world_size()
    cydist.all_gather_object(things, thing)
    return things


def _from_rank_0(text: str) -> str:
    texts: list[Any] = [text]
    cydist.broadcast_object_list(texts, 0)
    return str(texts[0])


def sent_bytes() -> int:
    """Return the bytes that this host's interfaces, without loopback, have sent."""
    total = 0
    for line in Path("/proc/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() != "lo":
            total += int(numbers.split()[8])
    return total


def _answer(sessions: Mapping[str, Session], name: str, command: Answer) -> Answer:
    """Execute a command on this rank."""
    before = sent_bytes()
    try:
        answer = sessions[name].do(command)
        answer |= {"sent": (before, sent_bytes())}
    except cydist.DistError:
        raise  # without its group no rank gets further commands
    except Exception as error:
        answer = dict(refusal(error))
    if (progress := sessions[name].progress) is not None:
        _let_others_finish(progress)
    return answer


def _let_others_finish(progress: Callable[[], object]) -> None:
    """Move a library's messages until its calls have ended on all ranks. They may end here while
    bytes that another rank waits for are still in the library's queues."""
    met = cydist.barrier(async_op=True)
    assert met is not None
    try:
        while not met.is_completed():
            progress()
    finally:
        met.wait()


def _serve(sessions: Mapping[str, Session]) -> None:
    """Execute rank 0's commands until its end."""
    while True:
        told: list[Any] = [None]
        cydist.broadcast_object_list(told, 0)
        if told[0] is None:
            return
        cydist.gather_object(_answer(sessions, *told[0]), None, 0)


class JobLibrary:
    """A participant on all ranks of the job, as rank 0 drives it.

    Attributes:
        sent: For each round of the cell: the bytes per call that the busiest host sent, with the
            call and the barriers before it.
    """

    def __init__(self, name: str, sessions: Mapping[str, Session], hosts: Sequence[str]) -> None:
        self.name = name
        self.sent: list[float] = []
        self._sessions = sessions
        self._hosts = hosts

    def command(self, command: Answer) -> list[Answer]:
        """As runner.Participant."""
        cydist.broadcast_object_list([(self.name, command)], 0)
        answers: list[Any] = [None] * len(self._hosts)
        cydist.gather_object(_answer(self._sessions, self.name, command), answers, 0)
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise WorkerError(f"{self.name}: rank {rank}: {answer['error']}", lost=False)
        if command["do"] == "case":
            self.sent = []
        elif command["do"] == "round":
            self.sent.append(self._sent_by_busiest(answers) / (command["iterations"] + 1))
        return answers

    def sent_per_call(self, rounds: int) -> float:
        """Return the median of the last rounds: those before them only find how many calls one
        takes."""
        return statistics.median(self.sent[-rounds:])

    def _sent_by_busiest(self, answers: Sequence[Answer]) -> int:
        counters: dict[str, list[tuple[int, int]]] = {}
        for host, answer in zip(self._hosts, answers, strict=True):
            counters.setdefault(host, []).append(answer["sent"])
        return max(
            max(after for _, after in each) - min(before for before, _ in each)
            for each in counters.values()
        )

    def close(self) -> None:
        """As runner.Participant."""


def _drive(
    given: argparse.Namespace,
    arguments: Sequence[str],
    libraries: Mapping[str, Library],
    running: Sequence[JobLibrary],
    places: Sequence[str],
) -> int:
    ranks = cydist.get_world_size()
    about = sysinfo.describe(["job", *arguments])
    about["ranks"] = f"{ranks} on {counted(len(set(places)), 'host')}: {_placement(places)}"
    if len(set(places)) > 1 and (control := sysinfo.congestion_control()):
        about["tcp"] = f"{control} (congestion control of rank 0's host)"
    about |= {name: ", ".join(each.about.values()) for name, each in libraries.items()}
    print(report.header(about))
    print(_head(given.rate), flush=True)
    wanted = cases(given.ops, given.sizes, given.dtype, dtype_of(given.dtype).itemsize, ranks)
    rows, sent = [], []
    for case, row in run_cases(wanted, running, given.rounds):
        rows.append((case, row))
        sent.append({each.name: each.sent_per_call(given.rounds) for each in running if each.sent})
        for each in running:
            print(_line(case, row, each, given.rate), flush=True)
        for said in report.failures(case, row):
            print(said, file=sys.stderr, flush=True)
    for line in filter(None, report.summary_lines(rows)):
        print(line)
    figures = report.document(about, rows, ranks)
    for cell, of_cell in zip(figures["cells"], sent, strict=True):
        cell["host_sends"] = of_cell
    report.save(figures, given.json)
    ours = [row[report.OURS] for _, row in rows]
    return int(any(each.failure or each.wrong for each in ours))


def _placement(places: Sequence[str]) -> str:
    """Return the number of the host of each rank."""
    order = list(dict.fromkeys(places))
    return " ".join(str(order.index(each)) for each in places)


def _head(link: float | None) -> str:
    return (
        f"{'op':<14} {'bytes':>10} {'library':<8} {'algorithm':<16} {'median us':>11} {'ratio':>6} "
        f"{'host sends':>12} {'/ bytes':>9} {'Gbit/s':>7}" + (f" {'share':>6}" if link else "")
    )


def _line(case: Case, row: Row, of: JobLibrary, link: float | None) -> str:
    found: Measurements = row[of.name]
    text = f"{case.op:<14} {case.nbytes:>10} {of.name:<8} {found.algorithm:<16}"
    if found.failure or not found.rounds:
        return f"{text} {'failed':>11}"
    sent = of.sent_per_call(len(found.rounds))
    gained = "" if of.name == report.OURS else f"{ratio(row[report.OURS], found):.2f}"
    share = f"{sent / case.nbytes:.2f}" if case.nbytes else ""
    speed = 8 * sent / found.median
    text += f" {report.micro(found.median):>11} {gained:>6} {sent:>12.0f} {share:>9}"
    text += f" {speed / 1e9:>7.3f}"
    return text + (f" {speed / link:>6.0%}" if link else "")
