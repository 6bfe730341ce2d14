"""Rendezvous handlers: turn a URL, a launcher or a store into one store that all ranks can access.

That store is at a given address, or rank 0 tells its address in a shared store
(shared_address.py) or over MPI (mpi_address.py). Each handler ends in `cydist.rendezvous.check_in`.
"""

from __future__ import annotations

import importlib
import os
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from cydist import config, logs
from cydist.errors import RendezvousError
from cydist.net.interfaces import address_towards
from cydist.rendezvous import launcher_env
from cydist.rendezvous.check_in import StaleCheckIn, check_in
from cydist.rendezvous.init_arguments import InitArguments
from cydist.rendezvous.job_store import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    is_torchruns,
    job_store,
    launchers_port,
    port_number,
)
from cydist.rendezvous.launcher_env import check_mpi_agrees, default_backend, launcher
from cydist.rendezvous.mpi_address import by_mpi
from cydist.rendezvous.rank_assignment import assign_rank, size_of
from cydist.rendezvous.shared_address import via_shared_store
from cydist.stores import MembershipStore, PrefixStore, Store
from cydist.stores.membership_store import close_on_error
from cydist.stores.store import Timeout
from cydist.waiting import DEFAULT_TIMEOUT, WaitNotices, duration

if TYPE_CHECKING:
    from urllib.parse import SplitResult  # slow to import, and env:// needs no URL

__all__ = ["check_mpi_agrees", "default_backend", "launcher", "rendezvous"]

_log = logs.Log("rendezvous")


def rendezvous(
    init_method: str | None = None,
    *,
    rank: int = -1,
    world_size: int = -1,
    store: Store | None = None,
    timeout: Timeout = DEFAULT_TIMEOUT,
    group_name: str = "",
    backend: str = "",
) -> tuple[MembershipStore, int, int]:
    """Meet the other ranks of the job. Returns a store for this meeting, the rank and the world
    size.

    Args:
        init_method: "env://" (the default), "tcp://host:port", "tcp://multicast-address:port",
            "file:///path", each with "?rank=R&world_size=N" if the call does not give them.
        store: Meet in this store instead; needs `rank` and `world_size`.
        group_name: Separates jobs that share an address, a file or a store.
        backend: The backend of the group that all ranks will make.

    Ranks are assigned if the URL is a multicast address or a file and none is requested. The
    returned store's own timeout is `timeout`; an explicit store keeps its own. Its `nonce` is a
    random name of this meeting, which is equal on all ranks and never reused.

    Raises ValueError for contradictory or missing arguments, RendezvousError after `timeout` with
    the missing ranks, or as soon as all have come if they ask for different backends. Raises
    PeerFailedError within a second if a rank that had reached the job's store dies and the store
    reports disconnects (a TCPStore does), AuthenticationError if a rank does not know the job's
    secret.
    """
    if store is not None and init_method is not None:
        raise ValueError("give init_method or store, not both")
    config.check_retired()
    logs.configure()
    if backend == "mpi" and world_size == 0 and store is None:
        rank = world_size = -1  # torch's placeholders: MPI's launcher numbers the ranks
    deadline = time.monotonic() + duration(timeout)
    url = None if init_method is None else known_url(init_method)
    with ExitStack() as shared_stores:
        call = InitArguments(
            url, _given(rank), _given(world_size), group_name, deadline, shared_stores
        )
        if store is not None:
            here, size = call.with_rank("an explicit store")
            return check_in(
                store, here, size, deadline=deadline, group_name=group_name, backend=backend
            )
        scheme = "env" if url is None else url.scheme
        if scheme in _REGISTERED:
            assert url is not None
            found, here, size = _ask(_REGISTERED[scheme], url, rank, world_size, call.remaining)
            call = call._replace(rank=here, world_size=size)
            call.with_rank(f"the handler of {scheme}://")
            return check_in(
                found, here, size, deadline=deadline, group_name=group_name, backend=backend
            )
        return _check_in_by(_with_query(call), _HANDLERS[scheme], timeout, backend)


def _check_in_by(
    call: InitArguments,
    handler: Callable[[InitArguments], tuple[Any, int, int]],
    timeout: Timeout,
    backend: str,
) -> tuple[MembershipStore, int, int]:
    """Reach the store through `handler` and meet there. Retry while the store belongs to another
    meeting, which rank 0 has not left."""
    pause, notices, why = FIRST_PAUSE, WaitNotices(), ""
    while True:
        try:
            store, here, size = handler(call)
        except RendezvousError as error:
            if not why:
                raise
            raise RendezvousError(
                f"{error}. Before that rank 0 served another meeting: {why}", ranks=error.ranks
            ) from None
        holder = None if _gives_out_ranks(call) else 0
        try:
            with close_on_error(store):
                store.set_timeout(timedelta(seconds=duration(timeout)))
                return check_in(
                    store, here, size, deadline=call.deadline, group_name=call.group_name,
                    holder=holder, backend=backend,
                )  # fmt: skip
        except StaleCheckIn as stale:
            _log.debug("rank 0 still serves another meeting, tried again soon: %s", stale)
            why = str(stale) or why  # the last look may have found no store
            notices.say_if_due(partial(_stale_notice, here, why))
            _retry(call, here, pause, why)
        pause = min(2 * pause, LONGEST_PAUSE)


def _stale_notice(rank: int, why: str, seconds: float) -> str:
    """Return what a rank says while rank 0 serves another meeting."""
    who = f"cydist: rank {rank} on {socket.gethostname()} (process {os.getpid()})"
    doubt = f": {why}. Unless that is an earlier start, correct it" if why else ""
    return f"{who} has waited {seconds:.0f} s for rank 0 to leave another meeting{doubt}"


def _retry(call: InitArguments, rank: int, pause: float, why: str = "") -> None:
    """Wait for rank 0 to leave another meeting that it still serves.

    Args:
        why: Why that is not this rank's meeting, if it is known.
    """
    if not call.remaining:
        raise RendezvousError(
            f"rendezvous: timeout: rank 0 still serves another meeting: {why}. Rank 0 has not left "
            "an earlier start, or the ranks of this one were started with wrong numbers: give each "
            "process its own rank (RANK), and all the same world_size (WORLD_SIZE)"
            if why
            else "rendezvous: timeout: rank 0 is still in another job at this address, in which "
            f"rank {rank} has been, or which has another group_name. Wait for that job to end, use "
            "another MASTER_PORT, or check that each process has its own RANK and the same "
            "WORLD_SIZE",
            ranks=(0,),
        )
    time.sleep(min(pause, call.remaining))


def rendezvous_through(
    shared_store: Any,
    host: Callable[[float], str],
    *,
    rank: int,
    world_size: int,
    timeout: Timeout,
    purpose: str = "",
) -> tuple[MembershipStore, int, int]:
    """Meet the ranks that share a store of another library; returns as `rendezvous`.

    Only an address is taken from that store: rank 0 opens one of cydist's stores, whose members
    authenticate, and writes its address to `shared_store`, signed.

    Args:
        host: Returns, by a deadline, the address at which rank 0's store listens; called on rank 0
            only.
        purpose: What the ranks meet for; an address that was written for something else is refused.
    """
    config.check_retired()
    logs.configure()
    deadline = time.monotonic() + duration(timeout)
    with ExitStack() as shared_stores:
        call = InitArguments(None, rank, world_size, "", deadline, shared_stores)
        call.with_rank("a store")

        def handler(call: InitArguments) -> tuple[Any, int, int]:
            met = via_shared_store(
                shared_store, call, lambda: host(deadline), f"torch {purpose}", "torch's store"
            )
            return met, rank, world_size

        return _check_in_by(call, handler, timeout, "")


def known_url(url: str) -> SplitResult:
    """Return the parts of a URL. Raises ValueError if its scheme is unknown."""
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    if parts.scheme not in _HANDLERS and parts.scheme not in _REGISTERED:
        known = ", ".join(f"{name}://" for name in (*_HANDLERS, *_REGISTERED))
        raise ValueError(f"init_method must begin with {known}, not {url!r}")
    return parts


def _given(value: int) -> int | None:
    """Return None for -1, which means that an argument was not given."""
    return None if value == -1 else value


def _with_query(call: InitArguments) -> InitArguments:
    """Take rank and world size from the URL's query; giving them twice is an error."""
    if call.url is None or not call.url.query:
        return call
    from urllib.parse import parse_qs

    for name, values in parse_qs(call.url.query, keep_blank_values=True).items():
        if name not in ("rank", "world_size"):
            raise ValueError(f"unknown {name!r} in {call.url.geturl()!r}")
        if getattr(call, name) is not None or len(values) > 1:
            raise ValueError(f"{name} is given twice: in the URL and as an argument")
        if not values[0].isdecimal():
            raise ValueError(f"{name} must be a number, not {values[0]!r}")
        number = int(values[0])
        call = call._replace(rank=number) if name == "rank" else call._replace(world_size=number)
    return call


def _from_launcher(call: InitArguments) -> InitArguments:
    """Fill in rank and size from the launcher."""
    placement = launcher_env.placement()
    return call._replace(
        rank=placement.rank if call.rank is None else call.rank,
        world_size=placement.size if call.world_size is None else call.world_size,
    )


# The handlers


def _by_environment(call: InitArguments) -> tuple[Any, int, int]:
    """Handle env://: MASTER_ADDR and MASTER_PORT, or the launcher's substitute for them."""
    call = _from_launcher(call)
    rank, size = call.with_rank("env://")
    logs.use_rank(rank)
    _log.debug("rank %d of %d, launcher %s", rank, size, launcher() or "none")
    host, port = config.MASTER_ADDR.get(), config.MASTER_PORT.get()
    if _agent_store(host, port):
        return _by_agent(call, host, port_number(port)), rank, size
    if host or port:
        if not port:
            raise ValueError("env:// needs MASTER_PORT beside MASTER_ADDR")
        if not host and rank > 0:
            raise ValueError("env:// needs MASTER_ADDR on every rank but 0")
        own = launchers_port(host, port)
        if own is not None:
            _log.debug("the launcher listens on port %d of %s for rank 0's store", own, host)
            return job_store(call, host, own, awaited=True), rank, size
        return job_store(call, host, port_number(port)), rank, size
    if size == 1:
        return job_store(call._replace(rank=0), "127.0.0.1", 0), rank, size
    return _without_address(call), rank, size


def _agent_store(host: str, port: str) -> bool:
    """Return whether torchrun's own store occupies MASTER_PORT."""
    return bool(host and port) and is_torchruns()


def _by_agent(call: InitArguments, host: str, port: int) -> Store:
    """Under torchrun: rank 0 opens one of cydist's stores, and writes its address to torchrun's."""
    try:
        torch_distributed: Any = importlib.import_module("torch.distributed")
    except ImportError as error:
        raise RendezvousError(
            f"torchrun's store at {host}:{port} takes torch to read, which cannot be imported "
            f"({error}): start the ranks with cydistrun"
        ) from None
    _log.debug("torchrun's store is at %s:%d: rank 0's address is read there", host, port)
    agent = torch_distributed.TCPStore(
        host, port, is_master=False, timeout=timedelta(seconds=max(1.0, call.remaining))
    )
    shared_store = PrefixStore(f"cydist/{launcher_env.job_id()}/{call.group_name}", agent)
    return via_shared_store(
        shared_store, call, lambda: address_towards(host, call.deadline),
        f"agent {call.group_name}", f"torchrun's store at {host}:{port}",
    )  # fmt: skip


def _without_address(call: InitArguments) -> Store:
    """Meet under a launcher that gives ranks but no address: on this host, through MPI, or at the
    first host of a Slurm step.

    MPI is not started if one host is enough: under another MPI's launcher that may end the process,
    which no code can catch.
    """
    _, size = call.with_rank("env://")
    if not (launcher_env.placement().single_host and launcher_env.job_id()):
        MPI = launcher_env.import_mpi() if launcher_env.under_mpi() else None
        if MPI is not None and MPI.COMM_WORLD.Get_size() == size:
            _log.debug("no MASTER_ADDR: rank 0 sends its address over MPI")
            return by_mpi(call, MPI)
        address = launcher_env.slurm_address()
        if address is not None:
            _log.debug("no MASTER_ADDR, and MPI does not serve: the first host of Slurm's step")
            return job_store(call, *address)
        raise ValueError(
            "env:// needs MASTER_ADDR and MASTER_PORT: they say where rank 0 is, which this "
            f"launcher ({launcher() or 'none'}) does not. Set them, use cydistrun, or install "
            "mpi4py for the launcher's MPI"
        )
    from cydist.stores import FileStore

    # The first rank empties a file that an earlier start left behind. Rank 0 uses it until all have
    # met, so that no later rank empties it again.
    path = str(launcher_env.job_file(launcher_env.job_id()))
    _log.debug("no MASTER_ADDR, and all ranks on this host: they meet in the file %s", path)
    shared_store = FileStore(path, size, call.remaining, fresh=True)
    call.shared_stores.callback(shared_store.close)
    return via_shared_store(
        shared_store, call, lambda: "127.0.0.1", f"host {call.group_name}", f"the file {path}"
    )


def _by_tcp(call: InitArguments) -> tuple[Any, int, int]:
    """Handle tcp://host:port, with given ranks; a multicast address assigns them."""
    assert call.url is not None
    try:
        host, port = call.url.hostname, call.url.port
    except ValueError as error:
        raise ValueError(f"{call.url.geturl()!r}: {error}") from None
    if not host or not port:
        raise ValueError(f"{call.url.geturl()!r} needs a host and a port: tcp://10.1.1.20:23456")
    if _is_multicast(host):
        from cydist.rendezvous import multicast

        size = size_of(call)
        store = multicast.find_store(host, port, size, call.group_name, call.deadline)
        return store, assign_rank(store, call.rank, size, call), size
    call = _from_launcher(call)
    rank, size = call.with_rank("tcp://")
    return job_store(call, host, port), rank, size


def _gives_out_ranks(call: InitArguments) -> bool:
    """Return whether this method assigns ranks: a file, or any process, may hold the store.

    Then ranks are unknown before the check-in. Otherwise rank 0 serves the store.
    """
    url = call.url
    return url is not None and (url.scheme == "file" or _is_multicast(url.hostname or ""))


def _is_multicast(host: str) -> bool:
    import ipaddress

    try:
        return ipaddress.ip_address(host).is_multicast
    except ValueError:
        return False


def _by_file(call: InitArguments) -> tuple[Any, int, int]:
    """Handle file:///path, on a file system that all ranks share."""
    from cydist.stores import FileStore

    assert call.url is not None
    if call.url.netloc:
        raise ValueError(f"{call.url.geturl()!r}: a path begins with a third slash, file:///path")
    path = call.url.path
    if not path.strip("/"):
        raise ValueError("file:// needs the path of a file")
    if call.world_size is None:
        call = _from_launcher(call)
    size = size_of(call)
    store = FileStore(path, size, max(0.001, call.remaining), fresh=True)
    return store, assign_rank(store, call.rank, size, call), size


_HANDLERS: dict[str, Callable[[InitArguments], tuple[Any, int, int]]] = {
    "env": _by_environment,
    "tcp": _by_tcp,
    "file": _by_file,
}

# Those of other schemes, registered by programs.
_REGISTERED: dict[str, Callable[..., Iterable[tuple[Any, int, int]]]] = {}


def register_rendezvous_handler(
    scheme: str, handler: Callable[..., Iterable[tuple[Any, int, int]]]
) -> None:
    """Let `handler` serve every `init_method` that begins with `scheme://`.

    Args:
        scheme: In lower case: a letter, then letters, digits, "+", "-" and ".".
        handler: Called as ``handler(url, timeout=timedelta)``. The `rank` and `world_size` of
            init_process_group, if given, are in the URL's query. It yields, or returns a list of,
            one triple: a store that all ranks reach, cydist's or another library's, this process's
            rank, and the number of ranks.

    Raises:
        ValueError: The scheme has a handler, or is not of that form.

    Examples:
        >>> def by_file(url, timeout):
        ...     yield dist.FileStore("/shared/job", 2), rank, 2
        >>> dist.register_rendezvous_handler("example", by_file)
    """
    from urllib.parse import urlsplit

    if urlsplit(f"{scheme}://").scheme != scheme or not scheme:
        raise ValueError(f"{scheme!r} is no scheme of a URL in lower case, such as 'etcd'")
    if scheme in _HANDLERS or scheme in _REGISTERED:
        raise ValueError(f"{scheme}:// has a rendezvous handler already")
    _REGISTERED[scheme] = handler


def _ask(
    handler: Callable[..., Iterable[tuple[Any, int, int]]],
    url: SplitResult,
    rank: int,
    world_size: int,
    left: float,
) -> tuple[Any, int, int]:
    """Return what a program's handler finds."""
    given = [f"{name}={n}" for name, n in (("rank", rank), ("world_size", world_size)) if n != -1]
    whole = url._replace(query="&".join(filter(None, [url.query, *given]))).geturl()
    for store, here, size in handler(whole, timeout=timedelta(seconds=left)):
        return store, here, size
    raise RendezvousError(f"the rendezvous handler of {url.scheme}:// has found no store")
