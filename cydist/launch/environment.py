"""What a worker finds in its environment, and the descriptors that it inherits.

The secret travels through a pipe: the environment and the command line of a process can be
read by others, and end up in logs.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, NamedTuple

from cydist import config
from cydist.errors import RendezvousError
from cydist.secret import new_secret

if TYPE_CHECKING:
    from cydist.launch.options import Options

_STALE = (
    config.SECRET_FD,
    config.STORE_FD,
    config.ERROR_FILE,
    config.MASTER_ADDR,
    config.MASTER_PORT,
)


class Generation(NamedTuple):
    """One attempt at the job: a restart is a new one, with a new secret and a new port.

    secret          32 bytes; None when every host has CYDIST_SECRET_FILE
    port            of rank 0's store
    store           the socket bound to it, for rank 0 to listen on; None: rank 0 binds it
    """

    number: int
    secret: bytes | None
    port: int
    store: socket.socket | None

    def close(self) -> None:
        """Give up our copy of the socket: rank 0 has its own."""
        if self.store is not None:
            self.store.close()


def new_generation(options: Options, number: int) -> Generation:
    """Make what generation `number` shares. Raises RendezvousError: the address is not ours."""
    secret = new_secret() if options.nodes == 1 else None
    if options.master_port is not None:
        return Generation(number, secret, options.master_port, None)
    store = hold_port(options.master_addr)
    return Generation(number, secret, store.getsockname()[1], store)


def hold_port(host: str) -> socket.socket:
    """A socket bound to a free port of `host`, so that no other job is given it.

    It does not listen yet: until rank 0 does, a store of another library in rank 0 may still
    bind the port itself (both sides set SO_REUSEADDR).
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        holder = socket.socket(family, kind, protocol)
        try:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(address)
        except OSError:
            holder.close()
            raise
    except OSError as error:
        raise RendezvousError(
            f"--master-addr {host} is not an address of this host: {error}"
        ) from None
    return holder


def secret_pipe(secret: bytes) -> int:
    """The read end of a pipe that holds `secret` and then ends; close it after use."""
    read, write = os.pipe()
    os.write(write, secret)
    os.close(write)
    return read


def job_variables(address: str, port: int, run_id: str, generation: int) -> dict[str, str]:
    """What all ranks of a job find alike."""
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        config.RUN_ID.names[0]: run_id,
        config.RESTART_COUNT.names[0]: str(generation),
        # What programs written for torchrun look for. False: rank 0 holds the store.
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": str(generation),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def remove_stale(variables: MutableMapping[str, str]) -> None:
    """Remove what another launcher further up may have left and what would mislead a rank."""
    for stale in _STALE:
        for name in stale.names:
            variables.pop(name, None)


def worker_environment(
    options: Options, generation: Generation, local_rank: int, inherited: Mapping[str, str]
) -> dict[str, str]:
    """`inherited`, with what tells a worker who it is; descriptors are added at the start."""
    rank = options.node_rank * options.local_size + local_rank
    variables = dict(inherited)
    remove_stale(variables)
    variables.update(
        job_variables(options.master_addr, generation.port, options.run_id, generation.number),
        RANK=str(rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(options.world_size),
        LOCAL_WORLD_SIZE=str(options.local_size),
        GROUP_RANK=str(options.node_rank),
        GROUP_WORLD_SIZE=str(options.nodes),
        ROLE_RANK=str(rank),
        ROLE_WORLD_SIZE=str(options.world_size),
        ROLE_NAME=options.role,
        TORCHELASTIC_MAX_RESTARTS=str(options.max_restarts),
    )
    if options.local_size > 1:
        variables.setdefault("OMP_NUM_THREADS", "1")
    return variables
