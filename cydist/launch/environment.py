"""A worker's environment variables and inherited descriptors.

The secret goes through a pipe, because other users may read the environment and the command line of
a process, and both end up in logs.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, NamedTuple

from cydist import config
from cydist.errors import RendezvousError
from cydist.net.secret import new_secret

if TYPE_CHECKING:
    from cydist.launch.options import LaunchOptions

_STALE = (
    config.SECRET_FD,
    config.STORE_FD,
    config.STORE_PORT,
    config.ERROR_FILE,
    config.RUN_FILES,
    config.MASTER_ADDR,
    config.MASTER_PORT,
)


# getaddrinfo's error codes for an unknown name, in place of an errno.
_NO_NAME = (socket.EAI_NONAME, socket.EAI_FAMILY, socket.EAI_NODATA)


class Ports(NamedTuple):
    """The ports of a job on one host: one for cydist's store, one for other libraries.

    Attributes:
        master: MASTER_PORT, for example of torch's store.
        store: Listens on the port of cydist's store. Only rank 0 can serve there, since no other
            process may bind a port that has a listener.
        reserved: Bound to `master` without listening, so that rank 0's libraries may still bind it;
            None: the user chose the port.
    """

    master: int
    store: socket.socket
    reserved: socket.socket | None

    def close(self) -> None:
        """Close this process's copies of the sockets: rank 0 has its own."""
        self.store.close()
        if self.reserved is not None:
            self.reserved.close()


def new_ports(host: str, master_port: int | None = None) -> Ports:
    """Take free ports of `host`. Raises RendezvousError if the address is not this host's, or if
    there is no port or descriptor left."""
    store = _bind(host)
    if store.getsockname()[1] == master_port:  # this one is for other libraries
        with store:  # so that the next port is a different one
            store = _bind(host)
    try:
        store.listen()  # rank 0 lengthens the queue, in which earlier ranks wait
        # No other process may bind the port now. Connections made here may outlive the store for a
        # while, in TIME_WAIT; rank 0 must be able to serve there again.
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if master_port is not None:
            return Ports(master_port, store, None)
        reserved = _bind(host, reuse=True)
    except BaseException:
        store.close()
        raise
    return Ports(reserved.getsockname()[1], store, reserved)


def _bind(host: str, *, reuse: bool = False) -> socket.socket:
    """Return a socket bound to a free port.

    Args:
        reuse: Other sockets with this option may bind the port too, until one of them listens.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            if reuse:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except (OSError, UnicodeError) as error:  # UnicodeError: an impossible name
        ours = isinstance(error, OSError) and error.errno not in (errno.EADDRNOTAVAIL, *_NO_NAME)
        why = "the job gets no port there" if ours else "it is not an address of this host"
        raise RendezvousError(f"--master-addr {host}: {why}: {error}") from None
    return bound


class Generation(NamedTuple):
    """One attempt at the job. A restart is a new generation, with a new secret and new ports.

    Attributes:
        secret: 32 bytes; None when every host has it in a file.
        port: MASTER_PORT.
        sizes: How many ranks each host has.
        ports: Of a job on one host; None: rank 0 serves the store on MASTER_PORT, which it binds.
    """

    number: int
    secret: bytes | None
    port: int
    sizes: tuple[int, ...]
    ports: Ports | None

    @property
    def world_size(self) -> int:
        """Return how many ranks the job has."""
        return sum(self.sizes)

    def first_rank(self, node: int) -> int:
        """Return the lowest rank on a host."""
        return sum(self.sizes[:node])

    def close(self) -> None:
        """Close this process's copies of the sockets: rank 0 has its own."""
        if self.ports is not None:
            self.ports.close()


def new_generation(
    options: LaunchOptions, number: int, sizes: tuple[int, ...], secret: bytes | None = None
) -> Generation:
    """Make generation `number`, with `sizes` ranks on the hosts.

    Args:
        secret: That several hosts were given; None: each has it in a file.

    Raises RendezvousError if the address is not this host's, or if there is no port or descriptor
    left.
    """
    if options.nodes > 1:
        assert options.master_port is not None
        return Generation(number, secret, options.master_port, sizes, None)
    ports = new_ports(options.master_addr, options.master_port)
    return Generation(number, new_secret(), ports.master, sizes, ports)


def secret_pipe(secret: bytes) -> int:
    """Return the read end of a pipe that holds `secret` and then ends; close it after use."""
    read, write = os.pipe()
    os.write(write, secret)
    os.close(write)
    return read


def job_variables(
    address: str, port: int, store_port: int | None, run_id: str, generation: int
) -> dict[str, str]:
    """Return the variables that are equal on all ranks of a job.

    Args:
        store_port: Of cydist's store; None: it is on `port`, which other libraries use for theirs.
    """
    own = (
        {} if store_port is None else {config.STORE_PORT.names[0]: f"{store_port} {address}:{port}"}
    )
    return {
        **own,
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        config.RUN_ID.names[0]: run_id,
        config.RESTART_COUNT.names[0]: str(generation),
        # Programs written for torchrun read this. False: rank 0 holds the store.
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": str(generation),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def remove_stale(variables: MutableMapping[str, str]) -> None:
    """Remove variables of an outer launcher that would mislead a rank."""
    for stale in _STALE:
        for name in stale.names:
            variables.pop(name, None)


def worker_environment(
    options: LaunchOptions, generation: Generation, local_rank: int, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return `inherited` with the variables that identify a worker; descriptors are added at its
    start."""
    rank = generation.first_rank(options.node_rank) + local_rank
    variables = dict(inherited)
    remove_stale(variables)
    ports = generation.ports
    store_port = None if ports is None else ports.store.getsockname()[1]
    variables.update(
        job_variables(
            options.master_addr, generation.port, store_port, options.run_id, generation.number
        ),
        RANK=str(rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(generation.world_size),
        LOCAL_WORLD_SIZE=str(options.local_size),
        GROUP_RANK=str(options.node_rank),
        GROUP_WORLD_SIZE=str(options.nodes),
        ROLE_RANK=str(rank),
        ROLE_WORLD_SIZE=str(generation.world_size),
        ROLE_NAME=options.role,
        TORCHELASTIC_MAX_RESTARTS=str(options.max_restarts),
    )
    if options.local_size > 1:
        variables.setdefault("OMP_NUM_THREADS", "1")
    return variables
