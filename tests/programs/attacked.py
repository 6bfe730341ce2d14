"""A rank of a job under attack: it checks every value that it gets, and says how it ended.

    attacked.py [URL]

Prints one line of JSON: {"rank", "end": "fine" or the error's class, "text"}; "wrong" in place of
the class says that a value was another one than was sent. From the environment:

    MODULE      cydist, or torch: torch.distributed with backend cydist
    DESK        port of an attacker who stands on the path to this rank: peers are told his place
    WITHOUT     what this rank does without: endpoints, records, frames, objects. For the proof
                that an attacker gets what he wants from ranks that do not protect it
    GATE        file to wait for before the start, with a dot and the rank behind its name. The rank
                says that it is there, with what any user may know, in a file NAME.RANK.here
    GATE_ADDRESS    the same, before the address is published
    GATE_CALLS  the same, before the calls
    UNTIL       file: calls go on until rank 0 finds it
    BACKEND     of the default group; tcp
    STORE       host:port of a TCPStore of the program's own, by which the ranks meet
    TURNS       rounds of calls
    PATIENCE    seconds that this rank waits for the other side of a handshake; cydist's own
    ODD         rank 0 gives up in a last call, and tells rank 1, which waits in another one
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any

import numpy as np

TEXT = "a text of plain values that nobody should change"
WAIT = float(os.environ.get("WAIT", "10"))


class Config:
    """An object that needs pickle."""

    def __init__(self, rank: int, turn: int) -> None:
        self.what = (rank, turn, "-" * 2000)


class Wrong(Exception):
    """A value is not the one that was sent."""


def check(name: str, got: object, expected: object) -> None:
    if got != expected:
        raise Wrong(f"{name}: {str(got)[:100]} in place of {str(expected)[:100]}")


def await_file(path: str) -> None:
    until = time.monotonic() + 60
    while not os.path.exists(path):
        assert time.monotonic() < until, f"{path} was not made"
        time.sleep(0.005)


def do_without(what: list[str]) -> None:
    """Switch protections off, in this process alone."""
    from cydist.api import object_tags
    from cydist.net import auth
    from cydist.net.records import Records

    if "endpoints" in what:
        auth._Handshake._compare = lambda self, settings, endpoints: ""  # type: ignore[method-assign]
    if "records" in what:
        Records._check = lambda self, expected, tag: None  # type: ignore[method-assign]
    if "objects" in what:
        object_tags._key = lambda group: b""
    if "frames" in what:
        keys = auth._Handshake.keys

        def public(self: Any, purpose: bytes) -> tuple[bytes, bytes]:
            return (bytes(32), bytes(32)) if purpose == b"frames" else keys(self, purpose)

        auth._Handshake.keys = public  # type: ignore[method-assign]


def await_gate(name: str) -> None:
    path = os.environ.get(name, "")
    if path:
        from job_ports import listening

        from cydist.rendezvous import launcher_env

        known = {"job": launcher_env.job_id(), "ports": sorted(listening(os.getpid())),
                 "slurm": launcher_env.slurm_address()}  # fmt: skip
        with open(f"{path}.{rank_given()}.draft", "w") as file:
            json.dump(known, file)
        os.rename(file.name, f"{path}.{rank_given()}.here")
        await_file(f"{path}.{rank_given()}")


def rank_given() -> str:
    """Return this rank's number, as its launcher says it."""
    from cydist.rendezvous import launcher_env

    return str(launcher_env.placement().rank)


def publish(desk: str) -> None:
    """Publish the attacker's place in place of this rank's, or its own later."""
    from cydist.backends.host import addresses
    from cydist.backends.host.connections import Connections

    address = Connections.address

    def published(self: Connections) -> bytes:
        await_gate("GATE_ADDRESS")
        own = addresses.Address.decode(address(self))
        if not desk:
            return own.encode()
        ((host, port),) = own.lanes[0]
        with socket.create_connection(("127.0.0.1", int(desk))) as asked:
            asked.sendall(b"%d" % port)
            led = int(asked.recv(16))
        return addresses.Address(own.rank, own.host, [[(host, led)]]).encode()

    Connections.address = published  # type: ignore[method-assign]


def calls(dist: Any, tensor: Any, rank: int, size: int, turn: int) -> None:
    """Do one round of every kind of call, and check what it gives."""
    if rank == 1:
        for value in (1, 2):
            dist.send(tensor(np.full(3, value + turn)), 0)
    elif rank == 0:
        for value in (1, 2):
            got = tensor(np.zeros(3, np.int64))
            dist.recv(got, 1)
            check("recv", got.tolist(), [value + turn] * 3)
    x = tensor(np.arange(5) + rank)
    dist.all_reduce(x)
    check("all_reduce", x.tolist(), [size * i + size * (size - 1) // 2 for i in range(5)])
    if not os.environ.get("CYDIST_INSECURE"):  # which refuses pickle
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, Config(rank, turn))
        expected = [(r, turn, "-" * 2000) for r in range(size)]
        check("all_gather_object", [getattr(o, "what", o) for o in objects], expected)
    plain: list[Any] = [{"turn": turn, "text": TEXT} if rank == 0 else None]
    dist.broadcast_object_list(plain, src=0)
    check("broadcast_object_list", plain[0], {"turn": turn, "text": TEXT})
    dist.barrier()


def store_calls(store: Any, rank: int, turn: int) -> None:
    """Let all ranks but 0 read what rank 0 writes, and count."""
    if rank == 0:
        store.set(f"key{turn}", f"value of turn {turn}")
    check("get", bytes(store.get(f"key{turn}")), f"value of turn {turn}".encode())
    check("check", store.check([f"key{turn}"]), True)


def run() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else None
    where = os.environ.get("STORE", "")
    turns = int(os.environ.get("TURNS", "5"))
    store: Any = None
    if os.environ.get("MODULE") == "torch":
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        import cydist.interop.torch

        gate()
        dist.init_process_group("cydist", init_method=url, timeout=timedelta(seconds=WAIT))
        tensor: Any = torch.from_numpy
    else:
        import cydist as dist  # type: ignore[no-redef]

        gate()
        tensor = np.asarray
        place: dict[str, Any] = {"init_method": url}
        rank, size = int(os.environ.get("RANK", "-1")), int(os.environ.get("WORLD_SIZE", "-1"))
        if where:
            host, _, port = where.partition(":")
            store = dist.TCPStore(host, int(port), size, rank == 0, WAIT)  # type: ignore[attr-defined]
            place = {"store": store, "rank": rank, "world_size": size}
        elif url:
            place |= {"rank": rank, "world_size": size}
        backend = os.environ.get("BACKEND", "tcp")
        dist.init_process_group(backend, timeout=WAIT, **place)
    await_gate("GATE_CALLS")
    rank, size = dist.get_rank(), dist.get_world_size()
    for turn in range(turns):
        calls(dist, tensor, rank, size, turn)
        if store is not None:
            store_calls(store, rank, turn)
    if until := os.environ.get("UNTIL"):
        turn, over = turns, 0
        while not over:
            calls(dist, tensor, rank, size, turn := turn + 1)
            found = tensor(np.array([rank == 0 and os.path.exists(until)], np.int64))
            dist.all_reduce(found)
            over = int(found[0])
    if os.environ.get("ODD"):
        x = tensor(np.zeros(5))
        dist.recv(x, 0) if rank else dist.all_reduce(x, timeout=0.3)
    dist.destroy_process_group()


def gate() -> None:
    """Say that all is imported, and wait until the start is allowed."""
    do_without(os.environ.get("WITHOUT", "").split())
    if patience := os.environ.get("PATIENCE"):
        from cydist.net import auth

        auth.HANDSHAKE_TIMEOUT = float(patience)
    publish(os.environ.get("DESK", ""))
    await_gate("GATE")


def main() -> int:
    told: dict[str, Any] = {"rank": rank_given(), "end": "fine", "text": ""}
    try:
        run()
    except Wrong as error:
        told |= {"end": "wrong", "text": str(error)}
    except Exception as error:
        told |= {"end": type(error).__name__, "text": str(error)}
        told["is"] = [kind.__name__ for kind in type(error).__mro__]
    sys.stdout.flush()
    # In one piece: ranks may share their stdout.
    os.write(1, json.dumps(told).encode() + b"\n")
    return 0 if told["end"] == "fine" else 3


if __name__ == "__main__":
    sys.exit(main())
