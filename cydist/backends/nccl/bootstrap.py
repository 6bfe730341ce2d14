"""Make a communicator after all ranks have checked in, because NCCL's join cannot be ended.

NCCL's own join blocks until all ranks have come, without a deadline. So the ranks meet before it
and exchange their NCCL versions and GPUs; after it they report that it succeeded. Any process could
join with the unique id, so it is sent only where the job's secret protects it.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import cydist.backends.nccl.cuda as gpus
from cydist import _native
from cydist.backends.nccl.binding import UNIQUE_ID_BYTES, Binding, Communicator, version_text
from cydist.errors import (
    DistBackendError,
    DistError,
    DistTimeoutError,
    RendezvousError,
    StoreTimeoutError,
    listed,
)
from cydist.group_names import group_title

if TYPE_CHECKING:
    from cydist.backends.nccl.cuda import Gpu
    from cydist.groups.process_group import ProcessGroup
    from cydist.stores import MembershipStore, Store

SLICE = 0.1  # seconds between checks for failed ranks
LOOK = 0.5  # the same, while a store is queried
SWAP_BYTES = 4096


class Exchange(Protocol):
    """Exchanges a few bytes between ranks before there is a communicator."""

    def all_ranks(self, what: str, own: bytes, deadline: float) -> list[bytes]:
        """Return each rank's bytes, once all ranks have come.

        Raises a DistError if one does not come.
        """

    def failed(self, why: str) -> None:
        """Notify ranks that wait in NCCL that this rank does not come."""

    def check(self) -> None:
        """Raise if a rank has failed, or is lost."""


class StoreExchange:
    """Exchange through the group's own part of the job's store."""

    def __init__(self, store: Store, rank: int, ranks: Sequence[int], name: str) -> None:
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._name = name

    def all_ranks(self, what: str, own: bytes, deadline: float) -> list[bytes]:
        keys = [f"{what}/{rank}" for rank in range(len(self._ranks))]
        self._store.set(keys[self._rank], own)
        limit = max(0.0, deadline - time.monotonic())
        try:
            self._wait(keys, deadline)
        except StoreTimeoutError as error:
            missing = tuple(
                self._ranks[i] for i, key in enumerate(keys) if not self._store.check([key])
            )
            raise RendezvousError(
                f"{group_title(self._name)} of backend 'nccl': {listed('rank', missing)} did "
                f"not come ({what}) within {limit:.3g} s",
                group=self._name, ranks=missing,
            ) from error  # fmt: skip
        found = self._store.multi_get(keys)
        # The id is not needed after all have read it: the last reader deletes it.
        if what == "id" and self._store.add("id/read", 1) == len(keys):
            for key in keys:
                self._store.delete_key(key)
        return found

    def _wait(self, keys: list[str], deadline: float) -> None:
        """Wait until all keys exist, and check now and then whether a rank has failed."""
        while True:
            limit = max(0.0, deadline - time.monotonic())
            try:
                self._store.wait(keys, min(limit, LOOK))
                return
            except StoreTimeoutError:
                self.check()
                if limit <= LOOK:
                    raise

    def failed(self, why: str) -> None:
        # The first error counts: the others follow from it.
        self._store.compare_set("failed", "", f"rank {self._ranks[self._rank]}: {why}")

    def check(self) -> None:
        try:
            self._store.wait(["failed"], 0.0)
        except StoreTimeoutError:
            return
        raise DistBackendError(
            f"{group_title(self._name)} of backend 'nccl': {self._store.get('failed').decode()}",
            group=self._name,
        )


class HostExchange:
    """Exchange through a group of CPU memory with the same ranks. It is for the remaining ranks of
    a group, whose store may have ended with the rank that served it, and for ranks in whose store
    others can read."""

    def __init__(self, host: ProcessGroup) -> None:
        self._host = host

    def all_ranks(self, what: str, own: bytes, deadline: float) -> list[bytes]:
        array = _native.empty(SWAP_BYTES)
        memoryview(array)[:] = own.ljust(SWAP_BYTES, b"\0")
        outputs = [_native.empty(SWAP_BYTES) for _ in range(self._host.size())]
        limit = max(0.0, deadline - time.monotonic())
        self._host.execute(
            f"nccl {what}",
            lambda call: self._host.run_all_gather(call, outputs, array),
            timeout=limit,
        )
        size = UNIQUE_ID_BYTES if what == "id" else SWAP_BYTES
        found = [bytes(memoryview(output)[:size]) for output in outputs]
        return found if what == "id" else [each.rstrip(b"\0") for each in found]

    def failed(self, why: str) -> None:
        self._host.fail(DistBackendError(why), "the making of a communicator")

    def check(self) -> None:
        self._host.check_usable("the making of a communicator")


def store_exchange(store: MembershipStore, host: ProcessGroup) -> Exchange:
    """Return an exchange between the ranks of a host group: through a store, if only processes with
    the job's secret can read the unique id there."""
    if store.signs:
        return HostExchange(host)
    return StoreExchange(store, host.rank(), host.ranks, host.group_name)


def join(
    binding: Binding, gpu: Gpu, exchange: Exchange, rank: int, ranks: Sequence[int], name: str,
    deadline: float, split: Communicator | None = None,
) -> Communicator:  # fmt: skip
    """Return a communicator of these ranks, on this thread's GPU.

    Args:
        split: The communicator, if the ranks have split it off another; it ends with an error.

    Raises RendezvousError if ranks are missing or do not fit together, DistBackendError for NCCL's
    errors, DistTimeoutError if NCCL does not return; its thread then stays in it.
    """
    try:
        return _join(binding, gpu, exchange, rank, ranks, name, deadline, split)
    except BaseException:
        if split is not None:
            split.abort()
        raise


def _join(
    binding: Binding, gpu: Gpu, exchange: Exchange, rank: int, ranks: Sequence[int], name: str,
    deadline: float, split: Communicator | None,
) -> Communicator:  # fmt: skip
    version = binding.version()
    own = {"version": version, "gpu": gpu.identity(version), "capability": gpu.capability()}
    said = [
        json.loads(text) for text in exchange.all_ranks("here", json.dumps(own).encode(), deadline)
    ]
    _check_fit(said, ranks, name)
    comm = split or _join_by_id(binding, gpu, exchange, rank, len(ranks), name, deadline)
    comm.capability = min(each["capability"] for each in said)
    try:
        exchange.all_ranks("ready", b"", deadline)
    except BaseException:
        comm.abort()
        raise
    return comm


def _join_by_id(
    binding: Binding, gpu: Gpu, exchange: Exchange, rank: int, size: int, name: str,
    deadline: float,
) -> Communicator:  # fmt: skip
    unique_id = binding.unique_id() if rank == 0 else b""
    unique_id = exchange.all_ranks("id", unique_id, deadline)[0]
    try:
        return _init(binding, gpu, exchange, rank, size, unique_id, name, deadline)
    except BaseException as error:
        with contextlib.suppress(DistError):
            exchange.failed(f"{type(error).__name__}: {error}")
        raise


def _check_fit(said: list[dict[str, object]], ranks: Sequence[int], name: str) -> None:
    """Raise RendezvousError for ranks that NCCL would refuse, or hang on."""
    versions = [each["version"] for each in said]
    if len(set(versions)) > 1:
        texts = ", ".join(
            f"rank {r}: {version_text(int(str(v)))}" for r, v in zip(ranks, versions, strict=True)
        )
        raise RendezvousError(
            f"{group_title(name)} of backend 'nccl': the ranks have different versions of NCCL: "
            f"{texts}",
            group=name,
        )
    places: dict[object, int] = {}
    for rank, each in zip(ranks, said, strict=True):
        other = places.setdefault(each["gpu"], rank)
        if other != rank:
            raise RendezvousError(
                f"{group_title(name)} of backend 'nccl': ranks {other} and {rank} are both on GPU "
                f"{str(each['gpu']).rpartition('/')[2]} of their host, and NCCL wants one for each "
                "rank: before init_process_group call cupy.cuda.Device(local_rank).use() or "
                "torch.cuda.set_device(local_rank), or let the launcher set CUDA_VISIBLE_DEVICES",
                group=name, ranks=(other, rank),
            )  # fmt: skip


def _init(
    binding: Binding, gpu: Gpu, exchange: Exchange, rank: int, size: int, unique_id: bytes,
    name: str, deadline: float,
) -> Communicator:  # fmt: skip
    """Join in a separate thread: it may never return, and after an error NCCL treats it as inside a
    group."""
    made: list[Communicator] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            gpu.adopt()
            made.append(binding.init(size, unique_id, rank))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="cydist-nccl-init", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(SLICE)
        if thread.is_alive():
            exchange.check()
            if time.monotonic() > deadline:
                raise DistTimeoutError(
                    f"{group_title(name)} of backend 'nccl': NCCL does not come back from making "
                    "the communicator, though all ranks were here; NCCL_DEBUG=INFO says what it "
                    "waits for. The thread that is in it stays: end the process",
                    group=name,
                )
    if errors:
        nccl_error = binding.as_nccl_error(errors[0])
        if nccl_error is None:
            raise errors[0]
        raise DistBackendError(
            f"{group_title(name)} of backend 'nccl': NCCL makes no communicator: {nccl_error}. "
            "NCCL_DEBUG=WARN says why",
            group=name,
        ) from errors[0]
    return made[0]


def current_gpu() -> Gpu:
    """Return this thread's GPU."""
    return gpus.current()
