"""Rendezvous handlers: turn a URL, a launcher or a store into one store that all ranks can access.

Each handler ends in `cydist.rendezvous.check_in`.
"""

from __future__ import annotations

import hmac
import importlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from cydist import config, logs
from cydist.errors import (
    AuthenticationError,
    DistNetworkError,
    DistStoreError,
    PeerFailedError,
    RendezvousError,
    StoreTimeoutError,
    counted,
    listed,
    warn_user,
)
from cydist.net import auth
from cydist.net.descriptors import make_room
from cydist.net.interfaces import address_towards, public_address
from cydist.rendezvous import launcher_env
from cydist.rendezvous.address_note import Address, signed_address, verified_address
from cydist.rendezvous.check_in import StaleCheckIn, check_in
from cydist.rendezvous.launcher_env import check_mpi_agrees, default_backend, launcher
from cydist.stores import MembershipStore, PrefixStore, Store, TCPStore
from cydist.stores.membership_store import close_on_error, served_by
from cydist.stores.store import Timeout
from cydist.tuning.file import MOST_RANKS
from cydist.waiting import DEFAULT_TIMEOUT, WaitNotices, duration

if TYPE_CHECKING:
    from urllib.parse import SplitResult  # slow to import, and env:// needs no URL

__all__ = ["check_mpi_agrees", "default_backend", "launcher", "rendezvous"]

_log = logs.Log("rendezvous")

# Rank 0's message to the others over MPI: a secret, whether it is one, and its signed address.
_ADDRESS = struct.Struct("<32s?512s")
# Before that: whether an answer is expected, rank 0's rank in MPI, a nonce, and its keyed hash
# under the user's secret.
_OFFER = struct.Struct("<?i16s32s")
_NONCE_BYTES = 16
_PROBES = 100  # calls of MPI after a receive
_MPI_TAG = 32_749  # every MPI has tags up to 32,767, and no other message has this one

# Seconds between checks of a rank that waits for rank 0's next store.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.25

# Seconds for which an address in a shared store is tried before it is read again: the first time,
# and at most. Then the seconds for which another service than this start's store may answer there,
# since rank 0 listens before it has written its address.
_FIRST_TRY, _LONGEST_TRY = 1.0, 30.0
_WRONG_SECONDS = 0.5


class _InitArguments(NamedTuple):
    """The arguments of init_process_group, for the handlers. None: not given."""

    url: SplitResult | None
    rank: int | None
    world_size: int | None
    group_name: str
    deadline: float
    shared_stores: ExitStack  # closed when all have met

    @property
    def remaining(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def with_rank(self, how: str) -> tuple[int, int]:
        """Return rank and world size, which must be known by now."""
        rank, size = self.rank, self.world_size
        if rank is None or size is None:
            lacking = [
                name
                for name, value in (("rank (RANK)", rank), ("world_size (WORLD_SIZE)", size))
                if value is None
            ]
            raise ValueError(
                f"{how} needs {' and '.join(lacking)}: pass it, set the variable, or start the "
                "ranks with cydistrun, torchrun, mpirun or srun. Without a launcher, as in a "
                "notebook, rank=0 and world_size=1 make a job of this process alone, and "
                "cydist.testing.run_threads runs a function on several ranks that are threads"
            )
        if not 0 <= rank < size:
            raise ValueError(f"rank must be from 0 to {size - 1}, not {rank}")
        _check_size(size)
        return rank, size


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
        call = _InitArguments(
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
    call: _InitArguments,
    handler: Callable[[_InitArguments], tuple[Any, int, int]],
    timeout: Timeout,
    backend: str,
) -> tuple[MembershipStore, int, int]:
    """Reach the store through `handler` and meet there. Retry while the store belongs to another
    meeting, which rank 0 has not left."""
    pause, notices, why = _FIRST_PAUSE, WaitNotices(), ""
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
        pause = min(2 * pause, _LONGEST_PAUSE)


def _stale_notice(rank: int, why: str, seconds: float) -> str:
    """Return what a rank says while rank 0 serves another meeting."""
    who = f"cydist: rank {rank} on {socket.gethostname()} (process {os.getpid()})"
    doubt = f": {why}. Unless that is an earlier start, correct it" if why else ""
    return f"{who} has waited {seconds:.0f} s for rank 0 to leave another meeting{doubt}"


def _retry(call: _InitArguments, rank: int, pause: float, why: str = "") -> None:
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
        call = _InitArguments(None, rank, world_size, "", deadline, shared_stores)
        call.with_rank("a store")

        def handler(call: _InitArguments) -> tuple[Any, int, int]:
            met = _via_shared_store(
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


def _with_query(call: _InitArguments) -> _InitArguments:
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


def _from_launcher(call: _InitArguments) -> _InitArguments:
    """Fill in rank and size from the launcher."""
    placement = launcher_env.placement()
    return call._replace(
        rank=placement.rank if call.rank is None else call.rank,
        world_size=placement.size if call.world_size is None else call.world_size,
    )


# The handlers


def _by_environment(call: _InitArguments) -> tuple[Any, int, int]:
    """Handle env://: MASTER_ADDR and MASTER_PORT, or the launcher's substitute for them."""
    call = _from_launcher(call)
    rank, size = call.with_rank("env://")
    logs.use_rank(rank)
    _log.debug("rank %d of %d, launcher %s", rank, size, launcher() or "none")
    host, port = config.MASTER_ADDR.get(), config.MASTER_PORT.get()
    if _agent_store(host, port):
        return _by_agent(call, host, _port(port)), rank, size
    if host or port:
        if not port:
            raise ValueError("env:// needs MASTER_PORT beside MASTER_ADDR")
        if not host and rank > 0:
            raise ValueError("env:// needs MASTER_ADDR on every rank but 0")
        own = _launchers_port(host, port)
        if own is not None:
            _log.debug("the launcher listens on port %d of %s for rank 0's store", own, host)
            return _tcp(call, host, own, awaited=True), rank, size
        return _tcp(call, host, _port(port)), rank, size
    if size == 1:
        return _tcp(call._replace(rank=0), "127.0.0.1", 0), rank, size
    return _without_address(call), rank, size


def _agent_store(host: str, port: str) -> bool:
    """Return whether torchrun's own store occupies MASTER_PORT."""
    return bool(host and port) and _is_torchruns()


def _is_torchruns() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _by_agent(call: _InitArguments, host: str, port: int) -> Store:
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
    return _via_shared_store(
        shared_store, call, lambda: address_towards(host, call.deadline),
        f"agent {call.group_name}", f"torchrun's store at {host}:{port}",
    )  # fmt: skip


def _via_shared_store(
    shared_store: Store,
    call: _InitArguments,
    listen_at: Callable[[], str],
    purpose: str,
    where: str,
) -> Store:
    """Let rank 0 open a store at `listen_at` and write in `shared_store` how to reach it. The other
    ranks read that.

    Args:
        purpose: What the ranks meet for: part of what rank 0 signs.
        where: Names `shared_store`, for messages.

    The address there may be left from an earlier start of the job, whose ranks are gone. So
    rank 0 writes a new random name with its address, and a store admits only ranks that know its
    name. A rank that finds no store at the address, or a different one, or an address for another
    world size, reads it again. An address that rank 0 did not sign is read again for a moment only.
    """
    rank, size = call.with_rank("env://")
    job = launcher_env.job_id()
    if rank == 0:
        host, name = listen_at(), os.urandom(8).hex()
        store = _tcp(call, host, 0, name)
        with close_on_error(store):
            address = Address(size, host, store.port, name)
            with served_by(None, "rendezvous"):
                shared_store.set("address", signed_address(address, purpose, job))
        return store
    patience, wrong, notices = _FIRST_TRY, _UnchangedSince(), WaitNotices()

    def notice(seconds: float) -> str:
        who = f"cydist: rank {rank} on {socket.gethostname()}"
        return f"{who} has waited {seconds:.0f} s for rank 0, whose address is not in {where} yet"

    while True:
        try:
            with notices.meanwhile(notice):
                shared_store.wait(["address"], call.remaining)
        except RuntimeError as error:
            raise RendezvousError(
                f"rendezvous: timeout: rank 0 has not said where its store is ({error})",
                ranks=(0,),
            ) from None
        with served_by(None, "rendezvous"):  # it may be gone again
            note = shared_store.get("address")
        try:
            address = verified_address(note, purpose, job, rank=rank, where=where)
            _check_world(address, rank, size, where)
            attempt = call._replace(deadline=min(call.deadline, time.monotonic() + patience))
            return _tcp(attempt, address.host, address.port, address.name)
        except RendezvousError:
            if not call.remaining:
                raise
            time.sleep(min(_FIRST_PAUSE, call.remaining))
        except (AuthenticationError, DistStoreError):
            # Somebody who changes it again and again does not keep this rank beyond its deadline.
            if not call.remaining or wrong.seconds(note) > min(_WRONG_SECONDS, call.remaining):
                raise
            time.sleep(_LONGEST_PAUSE)
        patience = min(2 * patience, _LONGEST_TRY)


def _check_world(address: Address, rank: int, size: int, where: str) -> None:
    """Raise RendezvousError if rank 0 wrote its address for a world of another size."""
    if address.size != size:
        raise RendezvousError(
            f"rendezvous: rank 0's address in {where} is for a world of "
            f"{counted(address.size, 'rank')}, and rank {rank} was told {size}: rank 0 has not "
            "come since an earlier start, or the ranks were told different world sizes",
            ranks=(0,),
        )


class _UnchangedSince:
    """Measures for how long a value has been the same."""

    def __init__(self) -> None:
        self._what: object = None
        self._began = 0.0

    def seconds(self, what: object) -> float:
        """Return the seconds since this value was first given, without another one in between."""
        now = time.monotonic()
        if what != self._what:
            self._what, self._began = what, now
        return now - self._began


def _without_address(call: _InitArguments) -> Store:
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
            return _by_mpi(call, MPI)
        address = launcher_env.slurm_address()
        if address is not None:
            _log.debug("no MASTER_ADDR, and MPI does not serve: the first host of Slurm's step")
            return _tcp(call, *address)
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
    return _via_shared_store(
        shared_store, call, lambda: "127.0.0.1", f"host {call.group_name}", f"the file {path}"
    )


def _by_mpi(call: _InitArguments, MPI: Any) -> Store:
    """Exchange rank 0's address through MPI, with a secret for ranks that have none.

    The address is signed under the secret that rank 0 uses.

    If rank 0 was given none, it offers the user's: it sends a keyed hash, and the others answer
    whether their user's secret gives the same, or whether they were given one. Unless all agree, a
    new secret travels over MPI.

    It uses synchronous sends, and none of MPI's collectives: those may leave a rank waiting for
    another rank's next call of MPI, which would come only after this meeting.
    """
    rank, size = call.with_rank("env://")
    purpose, job = f"mpi {call.group_name}", launcher_env.job_id()
    comm = MPI.COMM_WORLD
    if rank > 0:
        asked, zero, nonce, tag = _OFFER.unpack(_heard(call, MPI, MPI.ANY_SOURCE, _OFFER.size))
        if asked:
            own = auth.user_secret_tag(nonce)
            agreed = auth.is_configured() or (own is not None and hmac.compare_digest(own, tag))
            _tell(call, MPI, [zero], bytes([agreed]))
        value, fresh, note = _ADDRESS.unpack(_heard(call, MPI, zero, _ADDRESS.size))
        if fresh and not auth.is_configured():
            auth.set_secret(value)
        del value  # not for tracebacks
        where = "a message over MPI"
        address = verified_address(note.rstrip(b"\0"), purpose, job, rank=rank, where=where)
        _check_world(address, rank, size, where)
        return _tcp(call, address.host, address.port, address.name)
    others = [other for other in range(comm.Get_size()) if other != comm.Get_rank()]
    secret = _secret_over_mpi(call, MPI, others)
    host, name = public_address(), os.urandom(8).hex()
    store = _tcp(call, host, 0, name)
    with close_on_error(store):
        note = signed_address(Address(size, host, store.port, name), purpose, job)
        parts = (secret or b"", secret is not None, note)
        _tell(call, MPI, others, auth.Secret(_ADDRESS.pack(*parts)))
    return store


def _secret_over_mpi(call: _InitArguments, MPI: Any, others: Sequence[int]) -> bytes | None:
    """Offer the user's secret to all ranks; return the secret that they need, None if they have
    one. This rank uses the same."""
    given, nonce = auth.is_configured(), os.urandom(_NONCE_BYTES)
    tag = None if given else auth.user_secret_tag(nonce, create=True)
    zero = MPI.COMM_WORLD.Get_rank()
    _tell(call, MPI, others, _OFFER.pack(not given, zero, nonce, tag or b""))
    if given:
        return None
    answers = [_heard(call, MPI, other, 1) == b"\1" for other in others]
    if tag is not None and all(answers):
        return None
    secret = auth.new_secret()
    auth.set_secret(secret)
    warn_user(
        "the ranks' hosts share no secret, so rank 0 sends one over MPI, and a program that can "
        f"read this network sees it. Set {config.SECRET_FILE.names[0]} to a file of mode 0600 on "
        "every host, or share the home directory"
    )
    return secret


def _tell(call: _InitArguments, MPI: Any, ranks: Sequence[int], content: bytes) -> None:
    sent = [MPI.COMM_WORLD.Issend([content, MPI.BYTE], rank, _MPI_TAG) for rank in ranks]
    late = tuple(ranks[i] for i in _unfinished(sent, call.deadline))
    if late:
        raise RendezvousError(f"rendezvous: timeout: MPI's ranks {late} have not come", ranks=late)


def _heard(call: _InitArguments, MPI: Any, source: int, count: int) -> bytes:
    """Return a message of `count` bytes from MPI's rank `source`, or from rank 0 of the job."""
    message = bytearray(count)
    sender = 0 if source == MPI.ANY_SOURCE else source
    request = MPI.COMM_WORLD.Irecv([message, MPI.BYTE], source, _MPI_TAG)
    if _unfinished([request], call.deadline):
        request.Cancel()
        raise RendezvousError(
            f"rendezvous: timeout: nothing from rank {sender} over MPI (a receive from "
            "anyone of any tag that is pending on COMM_WORLD takes it: post it later, or set "
            "MASTER_ADDR)",
            ranks=(sender,),
        )
    for _ in range(_PROBES):  # MPICH over libfabric confirms a receive in calls after it
        MPI.COMM_WORLD.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
    return auth.Secret(message)


def _unfinished(requests: list[Any], deadline: float) -> list[int]:
    """Wait for MPI requests until a deadline, and return those that are not complete."""
    waiting = list(range(len(requests)))
    while True:
        waiting = [i for i in waiting if not requests[i].Test()]
        if not waiting or time.monotonic() >= deadline:
            return waiting
        time.sleep(0.001)


def _by_tcp(call: _InitArguments) -> tuple[Any, int, int]:
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

        size = _size(call)
        store = multicast.find_store(host, port, size, call.group_name, call.deadline)
        return store, _assign_rank(store, call.rank, size, call), size
    call = _from_launcher(call)
    rank, size = call.with_rank("tcp://")
    return _tcp(call, host, port), rank, size


def _gives_out_ranks(call: _InitArguments) -> bool:
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


def _by_file(call: _InitArguments) -> tuple[Any, int, int]:
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
    size = _size(call)
    store = FileStore(path, size, max(0.001, call.remaining), fresh=True)
    return store, _assign_rank(store, call.rank, size, call), size


def _size(call: _InitArguments) -> int:
    if call.world_size is None or call.world_size < 1:
        raise ValueError("giving out ranks takes world_size, the number of processes")
    if call.rank is not None and not 0 <= call.rank < call.world_size:
        raise ValueError(f"rank must be from 0 to {call.world_size - 1}, not {call.rank}")
    _check_size(call.world_size)
    return call.world_size


def _check_size(size: int) -> None:
    """Raise ValueError for more ranks than any job has: their names alone would fill the memory."""
    if size > MOST_RANKS:
        raise ValueError(f"world_size (WORLD_SIZE) must be at most {MOST_RANKS}, not {size}")


def _assign_rank(store: Store, rank: int | None, size: int, call: _InitArguments) -> int:
    """Assign ranks: processes that requested a rank get it, the others get the remaining ones in
    the order of their arrival.

    Every process computes the same from all requests, of which the first one makes a list.
    """
    with close_on_error(store):
        return _assigned_rank(
            PrefixStore(f"cydist/{call.group_name}/seats", store), rank, size, call
        )


def _assigned_rank(
    namespace: PrefixStore, rank: int | None, size: int, call: _InitArguments
) -> int:
    assert call.url is not None
    where = call.url.geturl()
    ticket = namespace.add("tickets", 1) - 1
    number, place = divmod(ticket, size)
    table = MembershipStore(str(number), namespace, range(size), noun="process number")
    table.join(place)
    table.sign(f"seats {call.group_name} {number}", place, where, launcher_env.job_id())
    table.set_timeout(call.remaining)
    noted = MembershipStore("sizes", namespace, range(size))
    noted.sign(f"sizes {call.group_name}", place, where, launcher_env.job_id())

    def compare_sizes() -> None:
        """Raise RendezvousError if a process was told another world size: it may wait for more."""
        first = noted.compare_set("first", b"", str(size)).decode()
        if first != str(size):
            noted.set("other", str(size))
        elif noted.check(["other"]):
            first = noted.get("other").decode()
        if first != str(size):
            both = sorted({int(first), size})
            raise RendezvousError(
                f"the processes were given different world sizes: {both}. Give all the same, or "
                f"end processes of an earlier start that still use {where}"
            )

    # The random word shows this process that the list is of this start.
    own = f"{-1 if rank is None else rank} {size} {os.urandom(8).hex()}"
    try:
        compare_sizes()
        answer = table.digest("wanted", place, range(size), own, b"\n".join, compare_sizes)
    except PeerFailedError as error:
        raise RendezvousError(str(error)) from None  # this process had no rank yet
    except StoreTimeoutError as error:
        keys = [f"wanted/{other}" for other in range(size)]
        here = [key for key in keys if table.check([key])]
        wanted = {_wanted(word.decode())[0] for word in table.multi_get(here)}
        # A process without a requested rank may get any of the remaining ones.
        missing = () if -1 in wanted else tuple(r for r in range(size) if r not in wanted)
        names = f", missing: {listed('rank', missing)}" if missing else ""
        raise RendezvousError(
            f"rendezvous: timeout with {len(here)} of {size} processes here{names}. If all were "
            f"started, processes of an earlier job may still use {where}: end them, or give "
            "another",
            ranks=missing,
        ) from error
    told = answer.decode().split("\n")
    asked = [_wanted(word) for word in told]
    sizes = {their_size for _, their_size in asked}
    if sizes != {size}:
        raise RendezvousError(f"the processes were given different world sizes: {sorted(sizes)}")
    if told[place] != own:
        raise AuthenticationError(
            f"process number {place} on {socket.gethostname()} found another note of its own in "
            f"{where} than it wrote: somebody repeats there what an earlier start wrote. Start the "
            "job where only its own ranks can write"
        )
    fixed = [wanted for wanted, _ in asked if wanted >= 0]
    twice = sorted({each for each in fixed if fixed.count(each) > 1})
    if twice:
        raise RendezvousError(f"rank {twice[0]} was asked for by two processes", ranks=(twice[0],))
    if rank is not None:
        return rank
    free = [each for each in range(size) if each not in fixed]
    automatic = [other for other, (wanted, _) in enumerate(asked) if wanted < 0]
    return free[automatic.index(place)]


def _wanted(word: str) -> tuple[int, int]:
    """Return the rank, or -1, and the world size for which a process has asked."""
    wanted, size, _ = word.split(" ")
    return int(wanted), int(size)


def _tcp(
    call: _InitArguments, host: str, port: int, name: str = "", *, awaited: bool = False
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


def _launchers_port(host: str, port: str) -> int | None:
    """Return the port on which the launcher listens for rank 0; None if there is none, or if the
    program has since set another address."""
    own, _, address = config.STORE_PORT.get().partition(" ")
    if not own or address != f"{host}:{port}":
        return None
    return _port(own, config.STORE_PORT.names[0])


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


def _port(text: str, name: str = "MASTER_PORT") -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        hint = ": name a port to torchrun, or let --standalone find one" if _is_torchruns() else ""
        raise ValueError(f"{name} must be a number from 1 to 65535, not {text!r}{hint}")
    return int(text)


_HANDLERS: dict[str, Callable[[_InitArguments], tuple[Any, int, int]]] = {
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
