"""A rank of a worker: start its library, then execute the driver's commands.

Between commands it sleeps in a read, so that it disturbs no other worker. Commands and answers are
lines of JSON on a Unix socket. When the driver ends, the stream ends, and then the rank.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import traceback
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from cydist.bench.peers import Cydist, Library, Mpi4py, torch_with
from cydist.bench.rank_loop import Session


def main(
    address: str, log: str, library: str, options: Mapping[str, str], **init_arguments: Any
) -> None:
    """Serve the driver that listens at `address`; the library's output goes to `log`.

    Args:
        init_arguments: Arguments of init_process_group for a rank that is a thread.
    """
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    control = socket.socket(socket.AF_UNIX)
    control.connect(address)
    with control, control.makefile("rwb") as stream:
        try:
            running = start(library, options, init_arguments)
        except Exception as error:
            send_answer(stream, refusal(error))
            stream.read()  # stay until all have come, since an early end looks like a crash
            return
        session = Session(running)
        gc.disable()  # no garbage collection in the middle of a loop; `case` collects
        send_answer(stream, {"rank": running.rank, "size": running.size, "about": running.about})
        for line in stream:
            command = json.loads(line)
            if command["do"] == "close":
                running.close()
                return
            try:
                answer = session.do(command)
            except Exception as error:
                answer = refusal(error)
            send_answer(stream, answer)


def start(
    library: str,
    options: Mapping[str, str],
    init_arguments: Mapping[str, Any] = MappingProxyType({}),
) -> Library:
    """Start a library on this rank.

    Args:
        library: "cydist", "torch", "mpi", "mpi-polled" or "raw".
        options: Of torch: `backend`; of cydist: `backend`, `arrays`, and settings, named without
            CYDIST_.
        init_arguments: As `main` takes it.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if library == "torch":
        return torch_with(options["backend"])
    if library.startswith("mpi"):
        return Mpi4py(polled=library == "mpi-polled")
    if library == "raw":
        return _raw_tcp()
    settings = dict(options)
    backend, arrays = settings.pop("backend"), settings.pop("arrays")
    os.environ.update({f"CYDIST_{name}": value for name, value in settings.items()})
    return Cydist(backend, arrays, **init_arguments)


def _raw_tcp() -> Library:
    from cydist.bench.raw_tcp import RawTcp
    from cydist.rendezvous.handlers import rendezvous

    store, rank, size = rendezvous(timeout=60)

    def from_rank_0(text: str) -> str:
        if rank == 0:
            store.set("raw", text)
        return store.get("raw").decode()

    return RawTcp(rank, size, from_rank_0)  # rank 0 serves the store until both are connected


def refusal(error: Exception) -> dict[str, str]:
    """Return an exception's text for the driver; the log has the traceback."""
    traceback.print_exc()
    sys.stderr.flush()
    lines = str(error).splitlines() or [""]
    return {"error": f"{type(error).__name__}: {lines[0]}"}


def send_answer(stream: Any, answer: Mapping[str, Any]) -> None:
    """Send one line to the driver."""
    stream.write(json.dumps(answer).encode() + b"\n")
    stream.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
