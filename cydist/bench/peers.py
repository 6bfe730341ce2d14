"""The measured libraries behind one interface, which binds a function and its arguments.

Every library does the same work on the same memory: ops that reduce or broadcast one array work in
place, the others from one array into another.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

TIMEOUT = 100  # timeout in seconds, for libraries that have one

# The call of a loop: a function and up to two arguments.
Bound = tuple[Callable[..., object], tuple[Any, ...]]


class Library(Protocol):
    """A library, started on this rank. One whose calls leave no results to check also has
    `moves_only`, which is True. One whose messages move only while it is called also has
    `progress()`, which moves them.

    Attributes:
        about: Its versions and transport, to print.
    """

    rank: int
    size: int
    about: dict[str, str]

    def bind(self, op: str, send: Any, recv: Any) -> Bound:
        """Return the call that runs `op` on these numpy arrays."""
        ...

    def barrier(self) -> object:
        """Wait for all ranks."""
        ...

    def begin(self, array: Any) -> Callable[[], object]:
        """Start an all_reduce in the background; return a function that waits for its end."""
        ...

    def algorithm(self, op: str, nbytes: int) -> str:
        """Return the algorithm that it would run for `op`, if known; else an empty string."""
        ...

    def close(self) -> None:
        """Leave the job."""
        ...


class TorchLike:
    """torch.distributed, or any library with its names.

    Args:
        wrap: Makes one of the library's arrays from a numpy array, sharing the memory.
    """

    def __init__(self, module: Any, wrap: Callable[[Any], Any], about: dict[str, str]) -> None:
        self.rank, self.size = module.get_rank(), module.get_world_size()
        self.barrier: Callable[[], object] = module.barrier
        self.about = about
        self._module, self._wrap = module, wrap

    def bind(self, op: str, send: Any, recv: Any) -> Bound:
        module = self._module
        if op == "barrier":
            return module.barrier, ()
        into, of = self._wrap(recv), self._wrap(send)
        if op == "pingpong":
            return pingpong(module.send, module.recv, self.rank, of, into)
        if op == "one_way":
            byte = self._wrap(np.zeros(1, np.uint8))
            return one_way(module.send, module.recv, self.rank, of, into, byte)
        if op in ("gather", "scatter"):
            whole = recv if op == "gather" else send
            blocks = [self._wrap(block) for block in np.split(whole, self.size)]
            at_root = blocks if self.rank == 0 else None
            return getattr(module, op), (of if op == "gather" else into, at_root)
        if not hasattr(module, op) and op in ("scan", "exscan"):
            raise NotImplementedError(f"{module.__name__} has no {op}")
        return {
            "all_reduce": (module.all_reduce, (into,)),
            "reduce": (module.reduce, (into, 0)),
            "scan": (getattr(module, "scan", None), (into,)),
            "exscan": (getattr(module, "exscan", None), (into,)),
            "broadcast": (module.broadcast, (into, 0)),
            "all_gather": (getattr(module, "all_gather_into_tensor", None), (into, of)),
            "reduce_scatter": (getattr(module, "reduce_scatter_tensor", None), (into, of)),
            "all_to_all": (module.all_to_all_single, (into, of)),
        }[op]

    def begin(self, array: Any) -> Callable[[], object]:
        wait: Callable[[], object] = self._module.all_reduce(self._wrap(array), async_op=True).wait
        return wait

    def algorithm(self, op: str, nbytes: int) -> str:
        return ""

    def close(self) -> None:
        self._module.destroy_process_group()


class Cydist(TorchLike):
    """cydist, which also reports its algorithm."""

    def __init__(self, backend: str, arrays: str, **init_arguments: Any) -> None:
        import cydist
        from cydist import config

        cydist.init_process_group(backend, timeout=TIMEOUT, **init_arguments)
        self.windows = bool(getattr(cydist.group.WORLD, "windows", False))
        about = {
            "version": f"cydist {cydist.__version__}",
            "transport": f"{backend}, {'shared memory' if self.windows else 'messages'}",
        }
        if config.ENCRYPT.is_on() and not self.windows:
            about["transport"] += ", encrypted"
        wrap: Callable[[Any], Any] = as_tensor if arrays == "torch" else same
        if arrays == "torch":
            about["version"] += f" on torch {importlib.import_module('torch').__version__}"
        super().__init__(cydist, wrap, about)
        self._backend = backend
        self.empty = cydist.empty_shared if arrays == "shared" else np.empty

    def algorithm(self, op: str, nbytes: int) -> str:
        from cydist import group
        from cydist.tuning import table as tuning_table

        if op in ("pingpong", "one_way"):
            return "send"
        if self._backend.startswith("torch:"):
            return "torch's"
        library = "" if self.windows else getattr(group.WORLD, "library", "")
        native = getattr(group.WORLD, "native", None)
        return tuning_table.choose_for_equal_blocks(
            op, nbytes, self.size, self.windows, library,
            hosts=getattr(native, "hosts", False),
            consecutive=getattr(native, "consecutive", False),
            placement=getattr(group.WORLD, "placement", ""),
        )  # fmt: skip


def torch_with(backend: str, **init_arguments: Any) -> Library:
    """Return torch.distributed with one of its backends, and with one thread per rank, as for all
    peers."""
    torch: Any = importlib.import_module("torch")
    distributed: Any = importlib.import_module("torch.distributed")
    if backend == "cydist":
        importlib.import_module("cydist.interop.torch")  # for a cydist that is not installed
    torch.set_num_threads(1)
    distributed.init_process_group(backend, **init_arguments)
    about = {"version": f"torch {torch.__version__}", "transport": backend}
    return TorchLike(distributed, as_tensor, about)


class Mpi4py:
    """An MPI through mpi4py, with explicit datatypes, so that mpi4py looks nothing up.

    Args:
        polled: Use non-blocking calls, each polled until it is complete.
    """

    def __init__(self, polled: bool = False) -> None:
        self._polled = polled
        mpi4py: Any = importlib.import_module("mpi4py")
        self._mpi: Any = importlib.import_module("mpi4py.MPI")
        self._comm = self._mpi.COMM_WORLD
        self.rank, self.size = self._comm.rank, self._comm.size
        self.barrier: Callable[[], object] = self._call("Barrier")
        library = self._mpi.Get_library_version().replace("\0", "").split("\n")[0]
        said = " ".join(library.split(",")[0].split())
        self.about = {"version": f"{said}, mpi4py {mpi4py.__version__}"}

    def bind(self, op: str, send: Any, recv: Any) -> Bound:
        if op == "barrier":
            return self._call("Barrier"), ()
        into, of = self._spec(recv), self._spec(send)
        if op == "pingpong":
            return pingpong(self._call("Send"), self._call("Recv"), self.rank, of, into)
        if op == "one_way":
            byte = self._spec(np.zeros(1, np.uint8))
            return one_way(self._call("Send"), self._call("Recv"), self.rank, of, into, byte)
        block = self._spec(send, send.size // self.size), self._spec(recv, recv.size // self.size)
        root = self.rank == 0
        name, arguments = {
            "all_reduce": ("Allreduce", (self._mpi.IN_PLACE, into)),
            "reduce": ("Reduce", (self._mpi.IN_PLACE, into) if root else (into, None)),
            "scan": ("Scan", (self._mpi.IN_PLACE, into)),
            "exscan": ("Exscan", (self._mpi.IN_PLACE, into)),
            "gather": ("Gather", (of, block[1] if root else None)),
            "scatter": ("Scatter", (block[0] if root else None, into)),
            "broadcast": ("Bcast", (into, 0)),
            "all_gather": ("Allgather", (of, block[1])),
            "reduce_scatter": ("Reduce_scatter_block", (block[0], into)),
            "all_to_all": ("Alltoall", block),
        }[op]
        return self._call(name), arguments

    def _call(self, name: str) -> Callable[..., object]:
        if not self._polled:
            found: Callable[..., object] = getattr(self._comm, name)
            return found
        begin = getattr(self._comm, f"I{name.lower()}")

        def call(*arguments: Any) -> None:
            done = begin(*arguments).Test
            while not done():
                pass

        return call

    def begin(self, array: Any) -> Callable[[], object]:
        wait: Callable[[], object] = self._comm.Iallreduce(
            self._mpi.IN_PLACE, self._spec(array)
        ).Wait
        return wait

    def _spec(self, array: Any, count: int | None = None) -> list[Any]:
        kind = self._mpi.Datatype.fromcode(array.dtype.char)
        return [array, array.size if count is None else count, kind]

    def algorithm(self, op: str, nbytes: int) -> str:
        return ""

    def progress(self) -> None:
        """Move messages that this rank's calls have left to MPI."""
        self._comm.Iprobe(self._mpi.ANY_SOURCE)

    def close(self) -> None:
        self._mpi.Finalize()


def pingpong(
    send: Callable[..., object], recv: Callable[..., object], rank: int, of: Any, into: Any
) -> Bound:
    """Run a ping-pong between the ranks 0 and 1; the others do nothing."""

    def serve() -> None:
        send(of, 1)
        recv(into, 1)

    def give_back() -> None:
        recv(into, 0)
        send(into, 0)

    return (serve, give_back)[rank] if rank < 2 else (lambda: None), ()


def one_way(
    send: Callable[..., object], recv: Callable[..., object], rank: int, of: Any, into: Any,
    byte: Any,
) -> Bound:  # fmt: skip
    """Send from rank 0 to rank 1, which sends a byte back when it has all; the others do
    nothing."""

    def serve() -> None:
        send(of, 1)
        recv(byte, 1)

    def answer() -> None:
        recv(into, 0)
        send(byte, 0)

    return (serve, answer)[rank] if rank < 2 else (lambda: None), ()


def same(array: Any) -> Any:
    """Return a numpy array unchanged."""
    return array


def as_tensor(array: Any) -> Any:
    """Return a torch tensor on the memory of a numpy array."""
    torch: Any = importlib.import_module("torch")
    if array.dtype.kind == "V" or array.dtype.name.startswith(("bfloat", "float8")):
        bits = torch.from_numpy(array.view(np.dtype(f"u{array.itemsize}")))
        return bits.view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array)
