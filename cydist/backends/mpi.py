"""CPU memory over MPI: the backend "mpi", on mpi4py.

Ranks of one host use memory that they share, as those of "tcp" do, and MPI carries the rest: its
own collectives where it has them with our meaning, our algorithms over its messages elsewhere.
mpi4py starts MPI and makes communicators; what moves data is compiled (src/transports/mpi.pyx).
Nothing here touches the user's own traffic: all of it is on communicators of ours.
"""

from __future__ import annotations

import atexit
import hashlib
import math
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar

from cydist import _native, config, launchers, tuning
from cydist.backends.endpoint import Endpoint
from cydist.backends.host import HostGroup
from cydist.backends.messages import NEWS_TAG
from cydist.backends.mpi_layouts import layouts
from cydist.backends.mpi_meeting import meet_before_mpi, places_and_hosts, reports_of
from cydist.backends.mpi_process import (
    ExitGuard,
    Threads,
    call_before_the_end,
    check_cuda_aware,
    load,
    start,
    wait_until,
)
from cydist.backends.pieces import everywhere
from cydist.backends.sharing import offer, share_memory, transport_of
from cydist.errors import DistTimeoutError, MismatchError, from_failure
from cydist.executor import THREADS
from cydist.group import Call, ProcessGroup
from cydist.types import Op, RedOpType, UserReduction, op_and_factor

if TYPE_CHECKING:
    from cydist._native import Array
    from cydist.backends.connections import Connections
    from cydist.registry import BackendOptions

CREATION_TAGS = 30_000  # of groups whose communicators are made at the same time
# Groups that have a communicator at a time; those beyond use messages. MPICH has 2,046 for all of
# a process, Open MPI 65,532.
COMMUNICATORS = 1000
WITH_FAILED = 1500  # with those of groups that have failed: what is left is the program's own
# From a call of MPI that ended until a neighbour's word of what it calls, or of a mismatch.
NEWS_SECONDS = 1.0
LOOK_SECONDS = 0.05  # between looks whether MPI has anything to carry by now

# dtype -> MPI's, and which operations MPI has with our meaning. Its MIN and MAX of floats
# lose NaN, its product of complex numbers differs in infinities, its logical operations
# are the reductions of bool; Open MPI's sums of integers of 8 and 16 bits do not wrap.
_FLOATS = {RedOpType.SUM: "SUM", RedOpType.PRODUCT: "PROD"}
_INTEGERS = {
    **_FLOATS,
    RedOpType.MIN: "MIN",
    RedOpType.MAX: "MAX",
    RedOpType.BAND: "BAND",
    RedOpType.BOR: "BOR",
    RedOpType.BXOR: "BXOR",
}
_NARROW: dict[RedOpType, str] = {
    op: name for op, name in _INTEGERS.items() if op is not RedOpType.SUM
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
    **{
        f"{sign.lower()}int{bits}": (f"{sign}INT{bits}_T", operations)
        for sign in ("", "U")
        for bits, operations in ((8, _NARROW), (16, _NARROW), (32, _INTEGERS), (64, _INTEGERS))
    },
    "float32": ("FLOAT", _FLOATS),
    "float64": ("DOUBLE", _FLOATS),
    "complex64": ("C_FLOAT_COMPLEX", {RedOpType.SUM: "SUM"}),
    "complex128": ("C_DOUBLE_COMPLEX", {RedOpType.SUM: "SUM"}),
    "bool": ("C_BOOL", _BOOL),
}


class MpiEndpoint(Endpoint):
    """This process's end of one communicator, shared by groups and closed by the last.

    messages    over the communicator; the link itself, or what carries its messages
    reports     by which late ranks are asked what they do; None: they are not
    hosts       the name of each rank's
    """

    def __init__(
        self, MPI: Any, comm: Any, link: _native.Link, messages: _native.MpiLink,
        hosts: Sequence[str], reports: Connections | None = None,
    ) -> None:  # fmt: skip
        super().__init__(link, self._leave, reports)
        self.MPI = MPI
        self._reports = reports
        self.host_of = hosts.__getitem__
        self.comm = comm
        self.messages = messages
        self.threads = Threads(MPI)
        self.trouble = self._trouble
        self.heard_by = math.inf  # when all groups end: until then they wait for late ranks' news
        self._guard = ExitGuard(MPI, self.leave_at_exit)
        _open.append(self)

    def attend(self, event: threading.Event, timeout: float | None) -> bool:
        """Wait for what a call in the background sets; the thread there may not call MPI."""
        messages = self.messages
        if not messages.allows():
            return event.wait(timeout)

        def done() -> bool:
            if messages.needed():  # which may begin at any time
                messages.move()
                return event.is_set()
            return event.wait(min(LOOK_SECONDS, max(0.0, deadline - time.monotonic())))

        deadline = math.inf if timeout is None else time.monotonic() + timeout
        return wait_until(done, deadline)

    def _trouble(self, peer: int) -> str:
        code = self.messages.error
        return f"MPI: {self.MPI.Get_error_string(code)}" if code else ""

    def _leave(self) -> None:
        """The last group has ended. MPI may give the communicator's number to another one when
        it is freed, which must not find what is still on its way to this one."""
        self._guard.remove()
        _open.remove(self)
        if self._reports is not None:
            self._reports.close()
        self.link.close()
        _closing.append(self)
        _sweep()

    def leave_at_exit(self) -> None:
        """The process ends: tell all members, and go when they do.

        MPI's own finalization would wait for them, deaf to what they ask; and without this
        notice they would wait for us until their deadlines. Raises MismatchError as `settle`.
        """
        self.end_together()
        with ExitStack() as leaving:  # all of it, also when one raises
            leaving.callback(self._wait_for_others)
            leaving.callback(self.link.close)
            for known in tuple(self.groups.values()):
                if isinstance(group := known(), MpiGroup):
                    leaving.callback(group.settle)

    def end_together(self) -> None:
        """All groups end now, and wait no longer than one for who has not made their last calls."""
        self.heard_by = min(self.heard_by, time.monotonic() + NEWS_SECONDS)

    def _wait_for_others(self) -> None:
        wait_until(self.messages.advance)  # as MPI's finalization, without a deadline
        self.messages.end()

    def over(self) -> bool:
        """Is MPI itself?"""
        return bool(self.MPI.Is_finalized())

    def end(self) -> None:
        """Everybody has left, and nothing is under way that may end."""
        if self.messages.end() and not self.over():
            self.comm.Free()


class Communicators:
    """This process's, of groups: MPI's limit is one for all jobs that it has been in.

    made        of groups that go on
    spent       of groups that had failed, which MPI does not get back
    begun       set when MPI has made one; those that were given up stay here
    """

    made = 0
    spent = 0
    begun: ClassVar[list[threading.Event]] = []

    @classmethod
    def few(cls) -> bool:
        """May there be one more?"""
        made = cls.made
        return made < COMMUNICATORS and made + cls.spent + len(cls.begun) < WITH_FAILED

    @classmethod
    def all_made(cls) -> bool:
        """Is MPI making none?"""
        return all(each.is_set() for each in cls.begun)


_open: list[MpiEndpoint] = []
_closing: list[MpiEndpoint] = []


def _sweep() -> None:
    """End what every rank has left by now."""
    for each in tuple(_closing):
        if each.messages.advance():
            _closing.remove(each)
            each.end()


def _end_all(MPI: Any) -> None:
    """Somebody ends MPI: so do all groups, while it still works."""
    for endpoint in tuple(_open):
        endpoint.end_together()
        for known in tuple(endpoint.groups.values()):
            if (group := known()) is not None:
                try:
                    group.destroy()
                except MismatchError as error:  # MPI would not say what its callback raised
                    print(f"cydist: {error}", file=sys.stderr, flush=True)
    _leave_all(os.getpid())
    if not Communicators.all_made() and MPI.get_vendor()[0] != "Open MPI":
        print(
            "cydist: the job is aborted: a group's first call was given up while MPI made the "
            "group's communicator. MPI still does, and MPICH crashes when it ends meanwhile",
            file=sys.stderr,
        )
        ExitGuard.abort(MPI, 1)


def _leave_all(pid: int) -> None:
    if os.getpid() == pid and not ExitGuard.aborting:
        for each in _closing:
            if not each.MPI.Is_finalized():
                each.leave_at_exit()
        _closing.clear()


class MpiGroup(HostGroup):
    """A group of ranks of one MpiEndpoint."""

    _endpoint: MpiEndpoint

    def __init__(self, endpoint: Endpoint, rank: int, peers: Sequence[int], **options: Any) -> None:
        super().__init__(endpoint, rank, peers, **{**options, "backend": "mpi"})
        self.sends_short = not self._endpoint.threads.main_only
        if not self._endpoint.threads.concurrent:
            self._serial.attend = self._endpoint.attend
        self._comm: Any = None
        self._met = self._size == 1
        self._met_for_devices = False

    def for_device(self, device: str) -> ProcessGroup:
        if device == "cuda" and self._staged is None and config.MPI_CUDA_AWARE.on():
            from cydist.backends.mpi_device import DeviceGroup  # few need it

            check_cuda_aware()
            return DeviceGroup.of(self)
        return super().for_device(device)

    def settle(self) -> None:
        """Compare the group's last call, where MPI made it, with the rank before this one; not
        for long. Raises MismatchError."""
        if self._failed is None and self._comm is not None and not self._endpoint.over():
            name = "destroy_process_group"
            deadline = min(self.deadline(NEWS_SECONDS), self._endpoint.heard_by)
            try:
                with self.failures(name, None, deadline):
                    self._native.settle(int(deadline * 1e9))
            except BaseException as error:
                self.fail(error, name)
                raise

    def leave_job(self) -> None:
        self._endpoint.end_together()

    def close(self) -> None:
        try:
            self.settle()
        finally:
            self._close()

    def _close(self) -> None:
        comm, self._comm = self._comm, None
        if comm is not None and not self._endpoint.over():
            Communicators.made -= 1
            # Both Open MPI and MPICH free a communicator without waiting for its other members,
            # and may give its number to another one, which would hear what they have sent here.
            if self._failed is None:
                comm.Free()
            else:
                Communicators.spent += 1
        super().close()

    def trouble_with(self, rank: int) -> str:
        return super().trouble_with(rank) or self._endpoint.trouble(rank)

    # Messages.

    def takes_gaps(self, array: Array, peer: int | None) -> bool:
        messages, place = self._endpoint.messages, -1 if peer is None else self._peers[peer]
        makes = self._endpoint.threads.concurrent
        return makes and messages.describes(place, array.nbytes) and self.layout_of(array) != 0

    def layout_of(self, array: Array) -> int:
        return 0 if array.contiguous else layouts(self._endpoint.MPI).of(array)

    # Which threads may call.

    def check_usable(self, name: str) -> None:
        super().check_usable(name)
        self._endpoint.threads.check(name)

    def hear(self, name: str) -> None:
        """As the base class. MPI may have ended a call here with wrong numbers that a neighbour
        has found: a receive that nobody answers waits for the news."""
        super().hear(name)
        if self._native.comm:
            news = self.irecv(_native.asarray(bytearray(1)), 1 - min(self._rank, 1), NEWS_TAG)
            with suppress(DistTimeoutError):
                news.wait(NEWS_SECONDS)

    # Its communicator.

    def _run(self, call: Call, *what: Any, **options: Any) -> None:
        if not self._met:
            self._meet(call)
        super()._run(call, *what, **options)

    def _meet(self, call: Call) -> None:
        """The group's first collective begins: make its communicator, unless it has windows.

        It is the group's alone: MPI matches collectives in the order in which a communicator's
        members call them, and groups of the same members do not wait for each other. Nor may the
        making of one wait for that of another: where not every thread may be in MPI there is none,
        and the group's calls go over messages.
        """
        if not self._native.windows and self._endpoint.threads.concurrent:
            self._agree_and_make(call)
        self._met = True

    def has_natively(self, call: Call, name: str, blocks: Sequence[Array], op: Op | None) -> bool:
        """Has MPI itself this collective on blocks of one size, joined and on a device? All
        members say the same. The first that it might have makes the group's communicator."""
        block = blocks[0]
        if isinstance(op, UserReduction):
            return False
        if op is not None:
            code, factor = op_and_factor(op)
            _, operations = REDUCTIONS.get(block.dtype_name, ("", {}))
            if factor is not None or code not in operations:
                return False
        if self._size == 1 or not self._endpoint.threads.concurrent:
            return False
        if len(blocks) > 1 and block.nbytes > self._endpoint.messages.piece_bytes:
            return False
        # The table's limits are for algorithms that cannot reach a device.
        if not tuning.leaves_to_library(name, self._size):
            return False
        if not self._met:
            self._meet(call)
        if self._native.windows and not self._met_for_devices:
            self._agree_and_make(call)
            self._met_for_devices = True
        return self._comm is not None

    def _agree_and_make(self, call: Call) -> None:
        if everywhere(self, call, Communicators.few(), about_gaps=False):
            self._make(call)

    def _make(self, call: Call) -> None:
        """All members have come. One that fails now may leave the others in MPI, which has no
        deadline here and hears no Ctrl-C, so a thread of its own waits there."""
        world, MPI = self._endpoint.comm, self._endpoint.MPI
        members = world.Get_group().Incl(self._peers)
        over, found = threading.Event(), []

        def make() -> None:
            with suppress(MPI.Exception):  # on all members: MPI has no more of them
                found.append(world.Create_group(members, self._context % CREATION_TAGS))
            over.set()

        Communicators.begun.append(over)
        THREADS.run(make)
        while not over.wait(min(LOOK_SECONDS, call.remaining())):
            self.check_usable(call.name)  # another thread may have ended the group, or a rank
            with self.failures(call.name, call.seq, call.deadline, call.began):
                self._native.hear()
            if call.remaining() == 0:
                raise from_failure(
                    _native.Failure("timeout", -1), call.name, self.group_name, self.ranks,
                    call.seq, call.deadline - call.began, "MPI makes the group's communicator",
                )  # fmt: skip
        Communicators.begun.remove(over)
        if found:
            self._comm = found[0]
            self._comm.Set_errhandler(MPI.ERRORS_RETURN)
            Communicators.made += 1
            self._native.comm = MPI._handleof(self._comm)


# Making groups.


def create(options: BackendOptions, pg_options: object = None) -> ProcessGroup:
    """A group of backend "mpi": every rank is a rank of MPI's COMM_WORLD, in any order.

    Raises UnsupportedError without mpi4py or MPI, RendezvousError when MPI's ranks are not
    the job's.
    """
    transport_of("mpi")
    MPI = load()
    meet_before_mpi(options)
    start(MPI)
    _prepare(MPI)
    _sweep()
    places, hosts = places_and_hosts(MPI, options)
    world = MPI.COMM_WORLD
    members = world.Get_group().Incl(places)
    digest = hashlib.sha256(options.group_id.encode()).digest()
    tag = int.from_bytes(digest[:4], "little") % CREATION_TAGS
    comm = world.Create_group(members, tag)
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    messages = _native.MpiLink(
        options.group_rank,
        options.group_size,
        MPI._handleof(comm),
        MPI._handleof(MPI.BYTE),
        MPI.ANY_SOURCE,
        launchers.place().local_size or 1,
        comm.Get_attr(MPI.TAG_UB),
        Threads(MPI).callers,
    )
    store = options.store
    link: _native.Link = messages
    try:
        store.set(f"place/{options.group_rank}", offer("mpi"))
        offers = store.multi_get([f"place/{peer}" for peer in range(options.group_size)])
        link = share_memory(store, messages, offers, "mpi")
        reports = reports_of(options)
    except BaseException:  # the others wait for its end
        MpiEndpoint(MPI, comm, link, messages, hosts).share().release()
        raise
    return MpiGroup(
        MpiEndpoint(MPI, comm, link, messages, hosts, reports),
        options.group_rank,
        range(options.group_size),
        timeout=options.timeout,
        name=options.group_id,
        ranks=options.global_ranks_in_group,
    )


@cache
def _prepare(MPI: Any) -> None:
    """Tell the compiled part where MPI is, and what it can reduce."""
    _native.load_mpi(MPI.__file__)
    _native.use_in_place(int(MPI.IN_PLACE) % 2**64)
    for name, (datatype, operations) in REDUCTIONS.items():
        for op, operation in operations.items():
            _native.use_reduction(
                _native.DTYPES[name],
                int(op),
                MPI._handleof(getattr(MPI, datatype)),
                MPI._handleof(getattr(MPI, operation)),
            )
    atexit.register(_leave_all, os.getpid())
    call_before_the_end(MPI, partial(_end_all, MPI))
