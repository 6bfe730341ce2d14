"""CPU memory over MPI: the backend "mpi", on mpi4py.

MPI's own broadcast, all_reduce, all_gather and barrier serve where they mean what ours
mean; everything else is derived from messages (cydist/group.py). Nothing here touches the
user's own traffic: all of it is on communicators of ours.

MPI returns wrong numbers when ranks disagree on dtype, operation or count, or hangs. So
every collective begins with one tiny all_reduce of its fingerprint, and MPI's collective
starts only when all ranks have the same. MPI's calls are non-blocking and polled, so every
wait has a deadline and lets Ctrl-C through. The one exception is the creation of a
subgroup's communicator, and that begins when all its members have met.
"""

from __future__ import annotations

import array as arrays
import hashlib
import os
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cydist import config, launchers
from cydist.backends.mpi_members import Endpoint, MpiMembers
from cydist.backends.mpi_messages import HERE, PIECE_BYTES, pieces
from cydist.backends.mpi_process import load
from cydist.errors import MismatchError, RendezvousError
from cydist.group import Call, ProcessGroup
from cydist.types import Op, RedOpType, op_and_factor

if TYPE_CHECKING:
    from cydist._native import Array
    from cydist.registry import BackendOptions

STAGING_BYTES = 1 << 16  # an all_gather into scattered memory goes through a copy up to here
TEXT_BYTES = 256  # what ranks tell each other of their calls when these differ
LATEST_REPORT = 1.0  # a rank that waits for others tells them where it is after this long
CREATION_TAGS = 30_000  # of groups whose communicators are made at the same time

# dtype -> MPI's, and which operations MPI has with our meaning. Its MIN and MAX of floats
# lose NaN, its product of complex numbers differs in infinities, its logical operations
# are the reductions of bool.
_FLOATS = {RedOpType.SUM: "SUM", RedOpType.PRODUCT: "PROD"}
_INTEGERS = {
    **_FLOATS,
    RedOpType.MIN: "MIN",
    RedOpType.MAX: "MAX",
    RedOpType.BAND: "BAND",
    RedOpType.BOR: "BOR",
    RedOpType.BXOR: "BXOR",
}
_BOOL = {
    RedOpType.SUM: "LOR",
    RedOpType.PRODUCT: "LAND",
    RedOpType.MIN: "LAND",
    RedOpType.MAX: "LOR",
    RedOpType.BAND: "LAND",
    RedOpType.BOR: "LOR",
    RedOpType.BXOR: "LXOR",
}
REDUCTIONS: dict[str, tuple[str, dict[RedOpType, str]]] = {
    **{f"int{bits}": (f"INT{bits}_T", _INTEGERS) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (f"UINT{bits}_T", _INTEGERS) for bits in (8, 16, 32, 64)},
    "float32": ("FLOAT", _FLOATS),
    "float64": ("DOUBLE", _FLOATS),
    "complex64": ("C_FLOAT_COMPLEX", {RedOpType.SUM: "SUM"}),
    "complex128": ("C_DOUBLE_COMPLEX", {RedOpType.SUM: "SUM"}),
    "bool": ("C_BOOL", _BOOL),
}
ROUNDED = ("float32", "float64", "complex64", "complex128")


class MpiGroup(MpiMembers):
    """A group of MPI ranks and its collectives."""

    # What all ranks must have in common.

    @contextmanager
    def _agreement(
        self,
        call: Call,
        collective: str,
        array: Array | None = None,
        *,
        op: Op | None = None,
        root: int | None = None,
        count: object = None,
    ) -> Iterator[None]:
        """Compare with all ranks what they are about to do, then do it.

        Collectives that a derived one is made of are part of it, and not compared again.
        Raises MismatchError, on every rank, when they differ.
        """
        if call.agreed or self._size == 1:
            yield
            return
        text = collective
        if op is not None:
            text += f" {op_and_factor(op)[0].name}"
        if array is not None:
            text += f" of {array.dtype_name}"
        if count is not None:
            text += f", {count} elements"
        if root is not None:
            text += f", root {self.ranks[root]}"
        comm = self._communicator(call)
        self._compare(call, comm, text)
        call.agreed = True
        yield

    def _compare(self, call: Call, comm: Any, text: str) -> None:
        """All ranks have the same text if the largest is also the smallest."""
        digest = hashlib.blake2b(f"{call.seq} {text}".encode(), digest_size=16).digest()
        one, two = struct.unpack("<qq", digest)
        mine = arrays.array("q", (one, two, ~one, ~two))
        largest = arrays.array("q", bytes(32))
        kind = self._MPI.INT64_T
        self._waiting = call.seq
        self._finish(
            call,
            comm.Iallreduce([mine, 4, kind], [largest, 4, kind], self._MPI.MAX),
            (mine, largest),
        )
        if largest[0] != ~largest[2] or largest[1] != ~largest[3]:
            self._explain(call, comm, text)

    def _explain(self, call: Call, comm: Any, text: str) -> None:
        """Raise what differs; every rank comes here."""
        mine = f"#{call.seq}: {text}".encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
        everyone = bytearray(TEXT_BYTES * self._size)
        byte = self._MPI.BYTE
        request = comm.Iallgather([mine, byte], [everyone, byte])
        self._finish(call, request, (mine, everyone), certain=True)
        texts = [
            everyone[start : start + TEXT_BYTES].rstrip(b"\0").decode("utf-8", "replace")
            for start in range(0, len(everyone), TEXT_BYTES)
        ]
        ours = texts[self._rank]
        others = [rank for rank in range(self._size) if texts[rank] != ours]
        theirs = texts[others[0]] if others else "the same up to its end"
        ranks = tuple(self.ranks[rank] for rank in others)
        self._told = True
        raise MismatchError(
            f"{self._where(call.name, call.seq)}: the ranks are in different calls. "
            f"Here: {ours}. Rank {ranks[0] if ranks else 'unknown'}: {theirs}",
            op=call.name, seq=call.seq, group=self.group_name, ranks=ranks,
        )  # fmt: skip

    def _communicator(self, call: Call) -> Any:
        """The group's own, made when all its members have come to its first collective."""
        if self._comm is None:
            ProcessGroup.barrier(self, call)
            world = self._messages.comm
            tag = self._id % CREATION_TAGS
            try:
                members = world.Get_group().Incl(self._peers)
                self._comm = world.Create_group(members, tag)
            except self._MPI.Exception as error:
                raise self.mpi_error(error) from error
            self._owns_comm = True
        return self._comm

    def _finish(self, call: Call, requests: Any, memory: object, *, certain: bool = False) -> None:
        """Wait for MPI. What is not complete at an error stays alive until it is.

        certain     every rank is known to come, so a failure of the group does not matter
        """
        pending = requests if isinstance(requests, list) else [requests]
        report = time.monotonic() + min(LATEST_REPORT, call.remaining() / 2)

        def done() -> bool:
            nonlocal report
            if self._messages.all_done(pending):
                return True
            if time.monotonic() > report:
                report = float("inf")
                self._messages.notify(self._id, self._others_peers, HERE, call.seq, "answer")
            if self._left:
                gone = [rank for rank, (last, _) in self._left.items() if last < call.seq]
                if gone:
                    raise self._failed or self._lost(call.name, call.seq, gone)
            return False

        try:
            if not self.wait_for(done, call.deadline, -1 if certain else call.seq):
                raise self._late(call, [
                    rank for rank in range(self._size)
                    if rank != self._rank and self._here.get(rank) != call.seq
                ])  # fmt: skip
        except BaseException:
            self._messages.keep(pending, memory)
            raise

    # Collectives that MPI has.

    def broadcast(self, call: Call, array: Array, root: int) -> None:
        with self._agreement(call, "broadcast", array, root=root, count=array.size):
            if self._size == 1 or array.nbytes == 0:
                return
            comm = self._communicator(call)
            self._finish(
                call,
                [comm.Ibcast([piece, self._MPI.BYTE], root) for piece in pieces(memoryview(array))],
                array,
            )

    def all_reduce(self, call: Call, array: Array, op: Op) -> None:
        with self._agreement(call, "all_reduce", array, op=op, count=array.size):
            native = self._native_reduction(array, op)
            if native is None:
                super().all_reduce(call, array, op)
                return
            kind, operation = native
            comm = self._communicator(call)
            memory = memoryview(array)
            self._finish(
                call,
                [
                    comm.Iallreduce(
                        self._MPI.IN_PLACE,
                        [piece, piece.nbytes // array.itemsize, kind],
                        operation,
                    )
                    for piece in pieces(memory)
                ],
                (array, memory),
            )

    def _native_reduction(self, array: Array, op: Op) -> tuple[Any, Any] | None:
        """MPI's datatype and operation, where MPI has them with our meaning."""
        if self._size == 1 or array.size == 0:
            return None
        if array.dtype_name in ROUNDED and config.DETERMINISTIC.on():
            return None  # the order in which MPI adds depends on its library and the hosts
        datatype, operations = REDUCTIONS.get(array.dtype_name, ("", {}))
        operation = operations.get(op_and_factor(op)[0])
        if operation is None:
            return None
        return getattr(self._MPI, datatype), getattr(self._MPI, operation)

    def all_gather(self, call: Call, outputs: Sequence[Array], array: Array) -> None:
        sizes = [output.size for output in outputs]
        even = all(size == sizes[0] for size in sizes)
        with self._agreement(call, "all_gather", array, count=sizes[0] if even else sizes):
            total = sum(output.nbytes for output in outputs)
            memory = _consecutive(self._MPI, outputs)
            staged = memory is None
            if total == 0 or total > (STAGING_BYTES if staged else PIECE_BYTES) or self._size == 1:
                super().all_gather(call, outputs, array)
                return
            if memory is None:
                memory = memoryview(bytearray(total))
            self._gather_into(call, memory, outputs, array, even, staged)
            if staged:
                for output, piece in zip(outputs, _cut(memory, outputs), strict=True):
                    memoryview(output)[:] = piece

    def _gather_into(
        self,
        call: Call,
        memory: Any,
        outputs: Sequence[Array],
        array: Array,
        even: bool,
        staged: bool,
    ) -> None:
        comm = self._communicator(call)
        byte = self._MPI.BYTE
        in_place = not staged and outputs[self._rank].same_memory(array)
        source = self._MPI.IN_PLACE if in_place else [memoryview(array), byte]
        if even:
            request = comm.Iallgather(source, [memory, array.nbytes, byte])
        else:
            lengths = [output.nbytes for output in outputs]
            starts = [sum(lengths[:rank]) for rank in range(self._size)]
            request = comm.Iallgatherv(source, [memory, lengths, starts, byte])
        self._finish(call, request, (memory, list(outputs), array))

    def barrier(self, call: Call) -> None:
        with self._agreement(call, "barrier"):
            pass  # nobody leaves the comparison before everybody has come

    # Collectives that are derived: the ranks agree first, so no message is misread.

    def reduce(self, call: Call, array: Array, root: int, op: Op) -> None:
        with self._agreement(call, "reduce", array, op=op, root=root, count=array.size):
            super().reduce(call, array, root, op)

    def reduce_scatter(self, call: Call, output: Array, inputs: Sequence[Array], op: Op) -> None:
        sizes = [block.size for block in inputs]
        with self._agreement(call, "reduce_scatter", output, op=op, count=sizes):
            super().reduce_scatter(call, output, inputs, op)

    def gather(self, call: Call, array: Array, outputs: Sequence[Array] | None, root: int) -> None:
        with self._agreement(call, "gather", array, root=root):
            super().gather(call, array, outputs, root)

    def scatter(self, call: Call, output: Array, inputs: Sequence[Array] | None, root: int) -> None:
        with self._agreement(call, "scatter", output, root=root):
            super().scatter(call, output, inputs, root)

    def all_to_all(
        self, call: Call, outputs: Sequence[Array], inputs: Sequence[Array], even: bool
    ) -> None:
        count = outputs[0].size if even else None
        with self._agreement(call, "all_to_all", outputs[0], count=count):
            super().all_to_all(call, outputs, inputs, even)

    def scan(self, call: Call, array: Array, op: Op, inclusive: bool) -> None:
        name = "scan" if inclusive else "exscan"
        with self._agreement(call, name, array, op=op, count=array.size):
            super().scan(call, array, op, inclusive)


def _consecutive(MPI: Any, arrays_: Sequence[Array]) -> Any:
    """The arrays as one piece of memory, if they lie one behind the other; else None."""
    end = start = arrays_[0].address
    for each in arrays_:
        if each.nbytes and each.address != end:
            return None
        end += each.nbytes
    return MPI.buffer.fromaddress(start, end - start)


def _cut(memory: memoryview, like: Sequence[Array]) -> Iterator[memoryview]:
    """Pieces of memory, as long as the arrays."""
    start = 0
    for each in like:
        yield memory[start : start + each.nbytes]
        start += each.nbytes


# Making groups.


def create(options: BackendOptions, pg_options: object = None) -> ProcessGroup:
    """A group of backend "mpi": every rank is a rank of MPI's COMM_WORLD, in any order.

    Raises UnsupportedError without mpi4py or MPI, RendezvousError when MPI's ranks are not
    the job's.
    """
    MPI = load()
    places, job = _places(MPI, options)
    world = MPI.COMM_WORLD
    members = world.Get_group().Incl(places)
    digest = hashlib.sha256(options.group_id.encode()).digest()
    tag = int.from_bytes(digest[:4], "little") % CREATION_TAGS
    comm = world.Create_group(members, tag)
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    return MpiGroup(
        Endpoint(MPI, comm, job),
        options.group_rank,
        range(options.group_size),
        timeout=options.timeout,
        name=options.group_id,
        ranks=options.global_ranks_in_group,
        comm=comm,
    )


def _places(MPI: Any, options: BackendOptions) -> tuple[list[int], str]:
    """Rank in COMM_WORLD of every rank of the group, and a name that no other group has.

    They all have come when this returns.
    """
    world, store = MPI.COMM_WORLD, options.store
    rank, size = options.group_rank, options.group_size
    if size == 1:
        return [world.Get_rank()], os.urandom(16).hex()
    if world.Get_size() == 1 and launchers.under_mpi():
        launchers.check_mpi_agrees(0, 1)
    store.set(f"mpi/{rank}", f"{world.Get_rank()} {world.Get_size()} {os.urandom(16).hex()}")
    keys = [f"mpi/{peer}" for peer in range(size)]
    store.wait(keys, options.timeout)
    said = [text.decode().split() for text in store.multi_get(keys)]
    places, sizes = [int(each[0]) for each in said], [int(each[1]) for each in said]
    if all(count == 1 for count in sizes):
        raise RendezvousError(
            f"backend 'mpi': this job has {size} ranks, but MPI says in every process that it is "
            "rank 0 of 1: the ranks were not started by MPI's launcher (torchrun, cydistrun and "
            f"spawn are none). Start them as `mpirun -n {size} python script.py` with the mpirun "
            f"of {MPI.get_vendor()[0]}, or use backend 'tcp', which needs no MPI"
        )
    if len(set(places)) != size or len(set(sizes)) != 1:
        raise RendezvousError(
            f"backend 'mpi': the {size} ranks of this job are not {size} ranks of one MPI job. "
            f"By rank, their rank in MPI's COMM_WORLD is {places} and its size is {sizes}: start "
            f"all of them by one `mpirun -n {size}`, or use backend 'tcp'"
        )
    return places, said[0][2]
