"""The far end of `cydistrun --hosts`: a launcher that ssh starts, and tells what to do.

    python -m cydist.launch.remote

It talks with cydist/launch/ssh.py over its standard streams:

    -> greeting     the addresses of ssh's connection, and a free port of this host
    <- order        options, variables and the job's secret: one line
    <- signals      a byte each; the end of the stream ends the job, as SIGTERM does
    -> the output of the launcher and its ranks, and then a last line with its exit code

The secret comes through ssh's pipe alone. No command line and no environment holds it.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys

from cydist import config
from cydist.launch.environment import remove_stale
from cydist.launch.job import run_job
from cydist.launch.options import resolve
from cydist.launch.supervisor import run_supervised
from cydist.net.secret import Secret

GREETING = b"cydist launcher greets: "


def main() -> int:
    """Run one host's launcher, and return its exit code."""
    reserved = _reserved_port()
    greeting = {
        "connection": config.SSH_CONNECTION.get(), "port": reserved.getsockname()[1],
    }  # fmt: skip
    os.write(1, b"\n%s%s\n" % (GREETING, json.dumps(greeting).encode()))
    line = _line()
    if not line.endswith(b"\n"):
        return 1  # ssh has ended
    order = json.loads(line)
    del line
    if order["given"]["master_port"] != reserved.getsockname()[1]:
        reserved.close()
    secret = Secret(bytes.fromhex(order.pop("secret")))
    config.SECRET_FILE.pop()  # of this host's user: the job has a secret of its own
    remove_stale(os.environ)
    os.environ.update(order["variables"])
    try:
        options = resolve(argparse.Namespace(**order["given"]))._replace(label=order["label"])
    except ValueError as error:
        print(f"cydistrun on {order['label']}: {error}", file=sys.stderr, flush=True)
        return _tell(order["mark"], 2, False)
    started, starting = os.pipe()
    os.set_blocking(started, False)
    code = run_supervised(
        lambda lifeline, files: run_job(
            options, lifeline, files, secret, lambda: os.write(starting, b"!")
        ),
        options.signals,
        _take_stdin(),
    )
    os.close(starting)
    return _tell(order["mark"], code, bool(os.read(started, 1)))


def _reserved_port() -> socket.socket:
    """Return a socket that keeps a free port from other processes, until one binds it that names it
    (SO_REUSEADDR): this host's launcher, and then rank 0."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("", 0))
    return sock


def _line() -> bytes:
    """Return the first line of stdin, and read no byte more."""
    line = bytearray()
    while not line.endswith(b"\n") and (part := os.read(0, 1)):
        line += part
    return bytes(line)


def _take_stdin() -> int:
    """Return a descriptor of stdin, in whose place the ranks find nothing."""
    stdin = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return stdin


def _tell(mark: str, code: int, has_started: bool) -> int:
    """Write the last line, which says how this launcher ended and whether it had started ranks."""
    os.write(1, f"{mark} {code} {int(has_started)}\n".encode())
    return code


if __name__ == "__main__":
    sys.exit(main())
