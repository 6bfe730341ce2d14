"""Subject "rendezvous": the time that many ranks take to meet, and the work of their store.

The ranks are threads of many processes on this machine. Each is a whole rank, with its own
connections to the store, address, and sockets to its peers. Rank 0, which serves the store, has a
process to itself.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cydist import config
from cydist.bench import report, sysinfo
from cydist.bench.options import checked, local_parser
from cydist.errors import DistError, DistTimeoutError
from cydist.launch.spawn import spawn
from cydist.net.acceptor import BACKLOG

SIZES = "64,256,1024"
RANKS_PER_PROCESS = 64  # more would wait for Python's lock
STACK_BYTES = 256 << 10  # of each thread
TIMEOUT = 600
LOOK_SECONDS = 0.25
MOST_SENDERS = 256  # ranks that make first contacts
SETTINGS = {
    "CYDIST_TRANSPORT": "tcp",  # as between hosts
    # Thousands of threads share a few cores, so that a living one may be late.
    "CYDIST_PEER_TIMEOUT": str(TIMEOUT),
}


class Meeting(NamedTuple):
    """The figures of one meeting.

    Attributes:
        met: Seconds from the start of all ranks until the last one has joined the job.
        contacts: Seconds until at most MOST_SENDERS ranks have sent their first messages, to log2 p
            peers each.
        store_cpu: Seconds of CPU time of the store's thread, until the end of that.
        requests, received_bytes, sent_bytes: Of the store, until then.
    """

    ranks: int
    met: float
    contacts: float
    store_cpu: float
    requests: int
    received_bytes: int
    sent_bytes: int


def main(arguments: Sequence[str]) -> int:
    """Print the table; return 1 if a meeting failed, else 0."""
    parser = local_parser(
        "rendezvous", "Let many ranks, which are threads of this machine, meet in one store."
    )
    parser.set_defaults(rounds=1)
    parser.add_argument("--ranks", default=SIZES, help=f"of each meeting ({SIZES})")
    given = checked(parser, arguments)
    if not all(text.isdecimal() and int(text) > 1 for text in given.ranks.split(",")):
        parser.error(f"--ranks {given.ranks}: numbers of 2 or more, separated by commas")
    about = sysinfo.describe(["rendezvous", *arguments])
    print(report.header(about))
    print(
        f"{'ranks':>6} {'met s':>8} {'ms/rank':>8} {'store ms/rank':>13} {'contacts s':>10} "
        f"{'requests/rank':>13} {'bytes in/rank':>13} {'bytes out/rank':>14}",
        flush=True,
    )
    found: list[Meeting] = []
    try:
        for size in map(int, given.ranks.split(",")):
            for _ in range(given.rounds):
                found.append(show(meet(size)))
    except DistError as error:
        print(error, file=sys.stderr)
        return 1
    report.save({"header": about, "rows": [each._asdict() for each in found]}, given.json)
    return 0


def show(one: Meeting) -> Meeting:
    """Print one row."""
    each = [number / one.ranks for number in one[4:]]
    print(
        f"{one.ranks:>6} {one.met:>8.2f} {one.met / one.ranks * 1e3:>8.2f} "
        f"{one.store_cpu / one.ranks * 1e3:>13.2f} {one.contacts:>10.2f} "
        f"{each[0]:>13.1f} {each[1]:>13.0f} {each[2]:>14.0f}",
        flush=True,
    )
    return one


def meet(size: int) -> Meeting:
    """Let `size` ranks meet, exchange messages, and leave."""
    processes = 1 + -(-(size - 1) // RANKS_PER_PROCESS)
    context = multiprocessing.get_context("spawn")
    ready, said = context.Barrier(processes), context.SimpleQueue()
    port_of_store = context.Value("i", 0)
    before = dict(os.environ)
    os.environ.update(SETTINGS)
    try:
        spawn(_process, (size, processes, port_of_store, ready, said), processes)
    finally:
        os.environ.clear()
        os.environ.update(before)
    answers = [said.get() for _ in range(processes)]
    traffic = next(each[3] for each in answers if each[3])
    began = min(each[0] for each in answers)
    return Meeting(
        size, max(each[1] for each in answers) - began, max(each[2] for each in answers), *traffic
    )


def _process(
    number: int, size: int, processes: int, port_of_store: Any, ready: Any, said: Any
) -> None:
    """Run some of the ranks as threads: rank 0, or an equal share of the others."""
    from cydist.backends.host import connect_attempt
    from cydist.net import auth
    from cydist.stores.tcp_server import servers

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    threading.stack_size(STACK_BYTES)
    # By default every thread that waits for Python's lock wakes 200 times a second.
    sys.setswitchinterval(0.1)
    ranks = [0] if number == 0 else list(range(number, size, processes - 1))

    def all_have_joined() -> None:
        ready.wait(TIMEOUT)  # in all processes
        # They met within cydist's own limits. From here on all threads share a few cores at once,
        # so that each is far slower than a rank of a real job.
        auth.HANDSHAKE_TIMEOUT = connect_attempt.CONNECT_TIMEOUT = TIMEOUT

    go, joined = threading.Event(), threading.Barrier(len(ranks), all_have_joined)
    ends: list[tuple[float, float]] = []
    traffic: list[tuple[float, int, int, int]] = []
    failed: list[BaseException] = []

    def one(rank: int) -> None:
        from cydist.api import process_groups

        go.wait()
        process_groups.thread_is_rank()
        try:
            process_groups.init_process_group(
                "tcp",
                f"tcp://127.0.0.1:{port_of_store.value}",
                rank=rank,
                world_size=size,
                timeout=TIMEOUT,
            )
            met = time.monotonic()
            joined.wait(TIMEOUT)
            start = time.monotonic()
            _first_contacts(rank, size)
            ends.append((met, time.monotonic() - start))
            joined.wait(TIMEOUT)
            if rank == 0:
                (store,) = servers
                numbers = store.requests, store.received_bytes, store.sent_bytes
                traffic.append((_cpu_seconds("cydist-store"), *numbers))
            process_groups.destroy_process_group()
        except BaseException as error:
            failed.append(error)
            if not isinstance(error, threading.BrokenBarrierError):  # the first failure's effect
                print(f"rank {rank}: {error!r}", file=sys.stderr, flush=True)
            joined.abort()
            ready.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
    if number == 0:  # listen before the ranks start, as a launcher does
        port_of_store.value = _listen()
    for thread in threads:
        thread.start()
    ready.wait(TIMEOUT)
    began = time.monotonic()
    go.set()
    for thread in threads:
        thread.join(TIMEOUT)
    if failed:
        raise failed[0]
    numbers = traffic[0] if traffic else None
    said.put((began, max(met for met, _ in ends), max(call for _, call in ends), numbers))


def _listen() -> int:
    """Listen for the store of rank 0, which takes the socket over, and return the port."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    port: int = listener.getsockname()[1]
    os.environ[config.STORE_FD.names[0]] = str(listener.detach())
    return port


def _first_contacts(rank: int, size: int) -> None:
    """Send a number to the ranks at distances of powers of two, as dissemination does, if this is
    one of the ranks that do; receive those that come here.

    Threads that wait in a call would look around 20 times a second, which thousands of them cannot
    on a few cores, so this looks now and then whether the messages have come.
    """
    from cydist import irecv, isend

    apart = -(-size // MOST_SENDERS)
    distances = [1 << step for step in range((size - 1).bit_length())]
    sources = [(rank - each) % size for each in distances]
    sources = [each for each in sources if each % apart == 0]
    came = np.full(len(sources), -1)
    works: list[Any] = [irecv(came[i : i + 1], source) for i, source in enumerate(sources)]
    if rank % apart == 0:
        works += [isend(np.array([rank]), (rank + each) % size) for each in distances]
    deadline = time.monotonic() + TIMEOUT
    while not all(work.is_completed() for work in works):
        if time.monotonic() > deadline:
            raise DistTimeoutError(f"rank {rank} got {came} from ranks {sources}")
        time.sleep(LOOK_SECONDS)
    for work in works:
        work.wait()
    assert came.tolist() == sources


def _cpu_seconds(name: str) -> float:
    """Return the CPU time of the thread with this name."""
    found = next(thread for thread in threading.enumerate() if thread.name == name)
    assert found.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(found.ident))
