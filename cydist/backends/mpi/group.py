"""A group of ranks of one MPI job, with its own communicator."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from cydist import _native, config
from cydist._native import CallRecord
from cydist.backends.host.chunking import true_on_all_ranks
from cydist.backends.host.endpoint import DRAIN_SECONDS, Endpoint
from cydist.backends.host.group import HostGroup
from cydist.backends.host.work import UNSENT_TAG
from cydist.backends.mpi.communicators import Communicators, of_some
from cydist.backends.mpi.datatypes import REDUCTIONS, datatypes
from cydist.backends.mpi.endpoint import MpiEndpoint
from cydist.backends.mpi.runtime import check_cuda_aware
from cydist.errors import from_call_error
from cydist.reduce_ops import Op, UserReduction, op_and_factor
from cydist.tuning import table as tuning_table

if TYPE_CHECKING:
    from cydist._native import Array
    from cydist.backends.host.staging_group import StagedGroup


class MpiGroup(HostGroup):
    """A group of ranks of one MpiEndpoint."""

    _endpoint: MpiEndpoint

    def __init__(self, endpoint: Endpoint, rank: int, peers: Sequence[int], **options: Any) -> None:
        super().__init__(endpoint, rank, peers, **{**options, "backend": "mpi"})
        self.library = self._endpoint.MPI.get_vendor()[0]
        if any(self._endpoint.by_mpi[peer] for peer in peers):
            self.placement = ""  # MPI's own collectives, wherever the ranks are
        self.fast_messages = self.fast_messages and not self._endpoint.threads.main_only
        if not self._endpoint.threads.concurrent:
            self._serial.poll_hook = self._endpoint.poll_hook
        self._comm: Any = None
        self._created = self._size == 1
        self._created_for_devices = False

    def staged_class(self) -> type[StagedGroup]:
        if not config.MPI_CUDA_AWARE.is_on():
            return super().staged_class()
        from cydist.backends.mpi.cuda_aware import DeviceGroup  # rarely needed

        check_cuda_aware()
        return DeviceGroup

    def drain(self) -> None:
        """As the base class, while MPI works."""
        if not self._endpoint.mpi_is_finalized():
            super().drain()

    def compare_last(self, deadline: float, leaves: bool) -> None:
        """As the base class; calls that MPI ran are first compared with the previous rank's."""
        if self._comm is not None:
            self.native.drain(int(deadline * 1e9))
        super().compare_last(deadline, leaves)

    def _close(self) -> None:
        comm, self._comm = self._comm, None
        if comm is not None and not self._endpoint.mpi_is_finalized():
            Communicators.made -= 1
            # Open MPI and MPICH free a communicator without waiting for its other members, and may
            # reuse its number. A new communicator would then receive their messages to this one:
            # from a failed call, or from a rank that `shrink_group` left out.
            if self.error is None and self._membership is None:
                comm.Free()
            else:
                Communicators.leaked += 1
        super()._close()

    def peer_error(self, rank: int) -> str:
        return super().peer_error(rank) or self._endpoint.peer_error(rank)

    # Messages.

    def accepts_strided(self, array: Array, peer: int | None) -> bool:
        messages, source = self._endpoint.messages, -1 if peer is None else self._peers[peer]
        makes = self._endpoint.threads.concurrent
        return makes and messages.takes_layout(source, array.nbytes) and self.layout_of(array) != 0

    def layout_of(self, array: Array) -> int:
        return 0 if array.contiguous else datatypes(self._endpoint.MPI).of(array)

    # Threads that may call.

    def check_usable(self, name: str) -> None:
        super().check_usable(name)
        self._endpoint.threads.check(name)

    def raise_pending_failure(self, name: str) -> None:
        """As the base class. MPI may have completed a call here with wrong numbers, which a
        neighbour has detected. So a receive without a sender waits for the report: it ends with the
        report, or when no other rank is left."""
        super().raise_pending_failure(name)
        if not self.native.library_comm:
            return
        deadline = time.monotonic() + DRAIN_SECONDS
        nothing = _native.asarray(bytearray(1))
        news = _native.irecv(self.native, nothing, _native.ANY_SOURCE, UNSENT_TAG)
        try:
            news.wait(int(deadline * 1e9))
        finally:
            news.cancel()
        try:
            with self.failures(name, None, deadline):
                self.native.poll_control()
        except Exception as error:
            self.fail(error, name)
            raise

    # The group's communicator.

    def prepare_first(self, call: CallRecord) -> None:
        if not self._created:
            self._create_communicator(call)

    def _create_communicator(self, call: CallRecord) -> None:
        """Make the group's communicator at its first collective, unless it has windows.

        Each group has its own: MPI matches collectives in the order in which a communicator's
        members call them, and groups of the same members do not wait for each other. For the same
        reason the creation of one must not wait for another's. If not every thread may call MPI,
        there is no communicator, and the group's calls use messages.
        """
        if not self.open_windows(call) and self._endpoint.threads.concurrent:
            self._agree_and_create(call)
        self._created = True

    def has_natively(
        self, call: CallRecord, name: str, blocks: Sequence[Array], op: Op | None
    ) -> bool:
        """Return whether MPI itself has this collective on equal, adjacent blocks on a device.

        All members get the same result. The first call that MPI might serve makes the group's
        communicator.
        """
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
        # The table's limits are for algorithms that cannot access a device.
        if not tuning_table.leaves_to_library(name, self._size):
            return False
        if not self._created:
            self._create_communicator(call)
        if self.open_windows(call) and not self._created_for_devices:
            self._agree_and_create(call)
            self._created_for_devices = True
        return self._comm is not None

    def _agree_and_create(self, call: CallRecord) -> None:
        if true_on_all_ranks(self, call, Communicators.may_create()):
            self._create(call)

    def _create(self, call: CallRecord) -> None:
        """Make the communicator. All members have come."""
        MPI = self._endpoint.MPI
        make = partial(of_some, MPI, self._endpoint.comm, self._peers, self._comm_id)
        with suppress(MPI.Exception):  # it has no more: the group's calls go by messages
            for made in Communicators.create(MPI, make):
                if made is not None:
                    self._comm = made
                    Communicators.made += 1
                    self.native.library_comm = MPI._handleof(made)
                    return
                self.check_usable(call.name)  # a thread or another rank may have ended the group
                with self.failures(call.name, call.seq, call.deadline, call.began):
                    self.native.poll_control()
                if call.remaining() == 0:
                    raise from_call_error(
                        _native.CallError("timeout", -1), call.name, self.group_name, self.ranks,
                        call.seq, call.deadline - call.began, "MPI makes the group's communicator",
                        title=self.title,
                    )  # fmt: skip
