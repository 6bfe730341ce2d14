"""A rank on one of several hosts, some of which vanish: argv[1] says what it does meanwhile.

It prints "ready", and then one JSON object: how its call ended, and when (time.monotonic()).
Ranks 0 and 1 are on one host, and ranks 2 and 3 on the other.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import cydist as dist

FOUND: dict[str, list[str]] = {}
LONG = 4 << 20  # elements, more than the kernels' buffers hold


def ready() -> None:
    """Connect with every rank, since a collective may go by one rank of each host."""
    others = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
    works = [dist.isend(np.zeros(1), other) for other in others]
    for other in others:
        dist.recv(np.empty(1), other)
    for work in works:
        work.wait()
    dist.barrier()
    print("ready", flush=True)


def reduce_for_ever(rank: int) -> None:
    """Reduce until an error, or until rank 0 is told to stop; compare each sum."""
    array, size, told = np.empty(1 << 17), dist.get_world_size(), [0.0]
    if rank == 0:
        on_line(lambda: told.append(1.0))
    ready()
    while True:
        array[:] = rank + 1
        array[0] = told[-1] if rank == 0 else 0.0
        dist.all_reduce(array)
        assert np.all(array[1:] == size * (size + 1) / 2)
        if array[0]:
            return


def on_line(do: Callable[[], object]) -> None:
    from threading import Thread

    Thread(target=lambda: (sys.stdin.readline(), do()), daemon=True).start()


def receive(rank: int) -> None:
    """Wait for what never comes; the connections are idle but for the ranks' questions."""
    ready()
    dist.recv(np.empty(1), (rank + 2) % 4)


def send(rank: int) -> None:
    """Send more than the other side reads, which waits for a line and then calls."""
    ready()
    if rank < 2:
        dist.send(np.zeros(LONG), rank + 2)
    else:
        sys.stdin.readline()
        dist.recv(np.empty(LONG), rank - 2)


def send_to_deaf(rank: int) -> None:
    """Send to ranks that take no byte from the kernel, as they hold Python's lock, for a while."""
    ready()
    if rank < 2:
        for _ in range(4):  # the first ones fill the kernel's buffers
            dist.isend(np.zeros(7000), rank + 2)
        works = [dist.isend(np.zeros(8000), rank + 2) for _ in range(400)]
        print("full", flush=True)
        for work in works:
            work.wait()
    else:
        print("full", flush=True)
        ctypes.PyDLL(None).sleep(int(sys.argv[2]))
        for _ in range(4):
            dist.recv(np.empty(7000), rank - 2)
        for _ in range(400):
            dist.recv(np.empty(8000), rank - 2)


def compute(rank: int) -> None:
    """Leave bytes under way, compute until a line comes, and then call."""
    ready()
    dist.send(np.zeros(8), (rank + 2) % 4)
    print("computing", flush=True)
    sys.stdin.readline()
    dist.recv(np.empty(1), (rank + 2) % 4, tag=1)


def late_call(rank: int) -> None:
    """Let connections to both ranks of the other host be idle until a line comes, then use all."""
    ready()
    others = [(rank + 2) % 4, 3 - rank]
    for other in others:
        work = dist.isend(np.zeros(8), other)
        dist.recv(np.empty(8), other)
        work.wait()
    print("computing", flush=True)
    sys.stdin.readline()
    for work in [dist.isend(np.zeros(LONG), other) for other in others]:
        work.wait()


def first_message(rank: int) -> None:
    """Wait, after a line, for ranks to which there is no connection yet."""
    print("ready", flush=True)
    sys.stdin.readline()
    dist.recv(np.empty(1), (rank + 2) % 4)


def wait_in_store(rank: int) -> None:
    """Wait for a key that never comes, in a store that rank 0 serves."""
    master, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1
    store = dist.TCPStore(master, port, 4, rank == 0, timeout=120)
    store.set(f"here/{rank}", b"")
    store.wait([f"here/{each}" for each in range(4)])
    ready()
    store.get("never")


def congestion(rank: int) -> None:
    """Report the congestion control of the connections to ranks, inside a host and between."""
    ready()
    here = f"10.77.0.{rank // 2 + 1}"
    kinds: dict[str, set[str]] = {"inside": set(), "between": set()}
    links = [int(name) for name in os.listdir("/proc/self/fd")]
    for fd in links:
        try:
            sock = socket.socket(fileno=os.dup(fd))
            peer, port = sock.getpeername()[:2]
            own = sock.getsockname()[1]
        except (OSError, ValueError):
            continue
        store = int(os.environ["MASTER_PORT"])
        if store not in (port, own):
            name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            kinds["inside" if peer == here else "between"].add(name.rstrip(b"\0").decode())
    FOUND.update({name: sorted(each) for name, each in kinds.items()})
    dist.barrier()


def come_together(rank: int) -> None:
    """Wait for a rank that is never started."""
    print("ready", flush=True)
    initialize()


def initialize() -> None:
    dist.init_process_group("tcp", timeout=float(os.environ.get("LIMIT", "120")))


def outcome(body: Callable[[int], object], rank: int) -> dict[str, Any]:
    try:
        body(rank)
        return {"kind": "ended well", "found": FOUND}
    except dist.DistError as error:
        return {"kind": type(error).__name__, "text": str(error), "ranks": error.ranks}


def main() -> None:
    rank, body = int(os.environ["RANK"]), globals()[sys.argv[1]]
    if body is not come_together:
        initialize()
    found = outcome(body, rank) | {"rank": rank, "at": time.monotonic()}
    if sys.argv[-1] == "shrink":
        dist.shrink_group(timeout=20)
        array = np.ones(1 << 10)
        dist.all_reduce(array)
        found |= {"left": dist.get_world_size(), "sum": array[-1],
                  "shrunk": time.monotonic()}  # fmt: skip
    print(json.dumps(found), flush=True)


main()
