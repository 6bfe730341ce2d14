"""The job's store, which rank 0 serves at an address that all ranks know."""

from __future__ import annotations

import os
import socket

from cydist import config, logs
from cydist.errors import (
    AuthenticationError,
    DistNetworkError,
    RendezvousError,
    StoreTimeoutError,
    counted,
)
from cydist.net.descriptors import make_room
from cydist.rendezvous import launcher_env
from cydist.rendezvous.init_arguments import InitArguments
from cydist.stores import TCPStore
from cydist.stores.membership_store import served_by

_log = logs.Log("rendezvous")

# Seconds between checks of a rank that waits for rank 0's next store.
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.25


def job_store(
    call: InitArguments, host: str, port: int, name: str = "", *, awaited: bool = False
) -> TCPStore:
    """Return the job's store at host:port, served by rank 0.

    Args:
        name: Of this start of the job, if its address does not distinguish it from others.
        awaited: The launcher listens there until rank 0 serves.
    """
    if host.strip("[]").lower().startswith("fe80:"):
        raise ValueError(
            f"{host} is a link-local address, which belongs to one network interface and not to a "
            "host: let MASTER_ADDR, or the URL, be another address of rank 0's host, or its name"
        )
    if call.rank == 0 and call.world_size is not None:
        ranks = call.world_size
        make_room(
            2 * ranks, 2 * ranks, f"rendezvous: serving the store to {counted(ranks, 'rank')}"
        )
    fd = _launchers_socket(port) if call.rank == 0 and port else None
    if call.rank == 0:
        _log.debug("serves the job's store on port %d of %s", port, host)
    else:
        _log.debug("connects to the job's store at %s:%d", host, port)
    try:
        with served_by(0, "rendezvous"):
            return TCPStore(
                host,
                port,
                call.world_size,
                call.rank == 0,
                max(0.001, call.remaining),
                wait_for_workers=False,
                master_listen_fd=fd,
                awaited=awaited,
                job=f"{launcher_env.job_id()} {name}".strip(),
            )
    except StoreTimeoutError as error:
        raise RendezvousError(f"rendezvous: rank 0 is missing: {error}", ranks=(0,)) from None
    except AuthenticationError:  # the secret, and not the socket
        raise
    except DistNetworkError as error:
        lost = config.STORE_FD.get()
        if call.rank != 0 or not (awaited and lost) or fd is not None:
            raise
        raise DistNetworkError(
            f"{error}. The launcher gave rank 0 a socket that listens there, and "
            f"{config.STORE_FD.names[0]}={lost} is not it: a program between the launcher and this "
            "one closed the descriptor and holds a copy. Let it replace itself by this one (exec), "
            "or hand its descriptors on (in Python: subprocess.run(..., close_fds=False))"
        ) from None


def launchers_port(host: str, port: str) -> int | None:
    """Return the port on which the launcher listens for rank 0; None if there is none, or if the
    program has since set another address."""
    own, _, address = config.STORE_PORT.get().partition(" ")
    if not own or address != f"{host}:{port}":
        return None
    return port_number(own, config.STORE_PORT.names[0])


def _launchers_socket(port: int) -> int | None:
    """Return the launcher's listening socket if it is on `port`; a URL may name another port. A
    process that rank 0 started has only the variable, without the socket."""
    try:
        found = socket.socket(fileno=int(config.STORE_FD.get()))
    except (ValueError, OverflowError, OSError):
        return None
    fits = (
        found.family in (socket.AF_INET, socket.AF_INET6)
        and found.getsockname()[1] == port
        and bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    )
    found.detach()
    return int(config.STORE_FD.pop()) if fits else None


def port_number(text: str, name: str = "MASTER_PORT") -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        hint = ": name a port to torchrun, or let --standalone find one" if is_torchruns() else ""
        raise ValueError(f"{name} must be a number from 1 to 65535, not {text!r}{hint}")
    return int(text)


def is_torchruns() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
