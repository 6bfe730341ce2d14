"""Group: a cydist group with torch's interface, torch.distributed.ProcessGroup.

torch calls these methods from Python and from C++ (DDP, functional collectives), always with
ranks of the group. Each takes the arguments of torch's own: tensors and an options object, or one
tensor and the options' fields.

torch's allgather is all_gather here, and so on; docs/guide/torch.md has the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import cydist
from cydist._native import fast_torch
from cydist.errors import counted
from cydist.group_names import GroupName
from cydist.groups.process_group import ProcessGroup
from cydist.groups.world import World
from cydist.interop.torch import sparse
from cydist.interop.torch.compiler import run_as_written
from cydist.interop.torch.options import op_of, options_of, rooted_options, single_entry, timeout_of
from cydist.interop.torch.work import BLOCKING, DoneWork, PendingWork, SeveralWorks
from cydist.waiting import duration
from cydist.work import Work

DEVICES = ("cpu", "cuda")  # devices whose tensors it takes; GPU tensors are staged through the host
TORCHS_OWN = ("default_pg", "undefined", "")  # descriptions that no user gave
Limit = timedelta | None


class Group(dist.ProcessGroup):
    """A torch group, from the view of one rank.

    Methods without a docstring do what torch's methods of that name do;
    docs/guide/torch.md lists their arguments.

    Args:
        store: torch's.
        world: The owner of the connections; None for a group that shares its parent's.
    """

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(
        self, host: ProcessGroup, name: str, store: Any, world: World | None = None
    ) -> None:
        super().__init__(host.rank(), host.size())
        self._host = host
        self._settled = False  # whether the host group knows its devices
        self._world = world
        self._store = store
        self._name = name
        self._desc = name
        self.kept: object = None  # lives as long as the group
        self._parts: dict[tuple[int, ...], int] = {}  # number of groups made of these ranks
        self._batch: list[dist.Work] | None = None  # between _start_coalescing and its end

    @property
    def host(self) -> ProcessGroup:
        """Return the cydist group that does the work. It is not the default group. A program's own
        cydist.init_process_group shares links with it only with torch=True."""
        if not self._settled:
            self._drop_other_backends()
        return self._host

    def _drop_other_backends(self) -> None:
        """Restrict the host group to the devices that torch assigned to cydist.

        With "cpu:cydist,cuda:nccl" torch makes only cydist's group, and records this configuration
        after it has made the group.
        """
        config = c10d._world.pg_backend_config.get(self)
        if config is None:
            return
        backends = dict(pair.split(":") for pair in config.split(","))
        self._host.devices = tuple(
            device for device in DEVICES if device == "cpu" or backends.get(device) == "cydist"
        )
        self._settled = True

    # Properties of a group that torch reads.

    def getBackendName(self) -> str:
        return "cydist"

    _get_backend_name = getBackendName
    name = getBackendName

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc
        if desc not in TORCHS_OWN and desc != self._name:
            self._host.group_name = GroupName(self._host.group_name, desc)

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    @property
    def _device_types(self) -> list[Any]:
        devices = self.host.devices
        # None while torch makes the group: torch 2.15 then attaches its flight recorder, which
        # takes groups of C++ only.
        return [torch.device(device) for device in devices] if self._settled else []

    def _get_backend(self, device: Any) -> Group:
        self.host.for_device(torch.device(device).type)
        return self

    get_backend = _get_backend

    @property
    def options(self) -> Any:
        """Return torch's options of a backend: its name and timeout."""
        options = torch._C._distributed_c10d.Backend.Options("cydist", self._timeout)
        options.group_name = self._name
        options.global_ranks_in_group = list(self.host.ranks)
        return options

    def get_group_store(self) -> Any:
        """Return torch's store."""
        return self._store

    getStore = get_group_store

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: calls are numbered from the first on."""

    def _get_sequence_number_for_group(self) -> int:
        last = self.host.last_call()
        return 0 if last is None else last.seq

    # Life cycle.

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self.host.timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default timeout of calls from now on."""
        self.host.timeout = duration(timeout)

    setTimeout = set_timeout
    _set_default_timeout = set_timeout

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """Do nothing: torch lets backends ignore this."""

    def abort(self) -> None:
        """End every call under way with an error, on all members. The group has failed then."""
        self.host.abort()

    def shutdown(self) -> None:
        """End the group. Idempotent."""
        self.host.destroy()
        self._world = None

    def part(self, ranks: Sequence[int], name: str, timeout: float, store: Any) -> Group:
        """Make a group of these ranks, including this one, over the same connections."""
        members = tuple(ranks)
        count = self._parts[members] = self._parts.get(members, 0) + 1
        # torch may reuse a name, when its group is gone or for a part of another parent. So
        # cydist's name begins with the parent's, and includes the ranks and a number: see
        # comm_id_of.
        whose = "_".join(map(str, members))
        unique = f"{self.host.group_name}:{name.replace('/', '|')}/{whose}/{count}"
        host = self.host.subgroup(members, unique, timeout)
        assert host is not None
        host.devices = self.host.devices
        return Group(host, name, store)

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: object = None,
    ) -> Group | None:
        """Make a group of some ranks of this one; None if this rank is not among them."""
        if self.rank() not in new_ranks:
            return None
        name = group_name or f"{self._name}:split:{'_'.join(map(str, new_ranks))}"
        seconds = self.host.timeout if timeout is None else duration(timeout)
        made = self.part(new_ranks, name, seconds, self._store)
        made.setGroupDesc(group_desc or name)
        return made

    splitGroup = split_group

    # Collectives. `opts` may also be the second argument of torch's other forms.

    def allreduce(
        self, tensors: Any, opts: Any = None, timeout: Limit = None, op: Any = None
    ) -> dist.Work:
        # The most frequent call, and often a small one, so it takes no unnecessary step.
        if fast_torch.all_reduce(tensors, opts, self._host):
            return BLOCKING
        opts = options_of(c10d.AllreduceOptions, opts, timeout, op)
        tensor = single_entry(tensors, "allreduce")
        kind = op_of(opts.reduceOp)
        if tensor.layout is not torch.strided:
            sparse.all_reduce(tensor, kind, self.host, timeout_of(opts))
            return DoneWork([tensor])
        work = cydist.all_reduce(tensor, kind, self.host, opts.asyncOp, timeout=timeout_of(opts))
        return self._torch_work(work, [tensor])

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        opts = options_of(c10d.AllreduceCoalescedOptions, opts, None)
        kind = op_of(opts.reduceOp)

        def start(some: list[list[Any]]) -> Work | None:
            return cydist.all_reduce_coalesced(
                some[0], kind, self.host, opts.asyncOp, timeout=timeout_of(opts)
            )

        return self._by_dtype(start, [tensors], tensors)

    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: Limit = None, *, root: int = 0
    ) -> dist.Work:
        opts = rooted_options(c10d.BroadcastOptions, opts, timeout, root)
        tensor = single_entry(tensors, "broadcast")
        work = cydist.broadcast(
            tensor, None, self.host, opts.asyncOp, opts.rootRank, timeout=timeout_of(opts)
        )
        return self._torch_work(work, [tensor])

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: Limit = None, *,
        root: int = 0,
    ) -> dist.Work:  # fmt: skip
        opts = rooted_options(c10d.ReduceOptions, opts, timeout, root, op)
        tensor = single_entry(tensors, "reduce")
        work = cydist.reduce(
            tensor, None, op_of(opts.reduceOp), self.host, opts.asyncOp, opts.rootRank,
            timeout=timeout_of(opts),
        )  # fmt: skip
        return self._torch_work(work, [tensor])

    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Limit = None
    ) -> dist.Work:
        if isinstance(input_tensors, torch.Tensor):
            output_tensors = [output_tensors]
        opts = options_of(c10d.AllgatherOptions, opts, timeout)
        outputs = single_entry(output_tensors, "allgather")
        tensor = single_entry(input_tensors, "allgather")
        work = cydist.all_gather(outputs, tensor, self.host, opts.asyncOp, timeout=timeout_of(opts))
        return self._torch_work(work, outputs)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        opts = options_of(c10d.AllgatherOptions, opts, None)
        work = cydist.all_gather_into_tensor(
            output, input, self.host, opts.asyncOp, timeout=timeout_of(opts)
        )
        return self._torch_work(work, [output])

    def all_gather_single_coalesced(
        self, output_lists: Any, input_list: Any, opts: Any = None
    ) -> dist.Work:
        opts = options_of(c10d.AllgatherOptions, opts, None)

        def start(some: list[list[Any]]) -> Work | None:
            return cydist.all_gather_into_tensor_coalesced(
                some[0], some[1], self.host, opts.asyncOp, timeout=timeout_of(opts)
            )

        return self._by_dtype(start, [output_lists, input_list], output_lists)

    def allgather_coalesced(
        self, output_lists: Any, input_list: Any, opts: Any = None
    ) -> dist.Work:
        opts = options_of(c10d.AllgatherOptions, opts, None)

        def start(some: list[list[Any]]) -> Work | None:
            return cydist.all_gather_coalesced(
                some[1:], some[0], self.host, opts.asyncOp, timeout=timeout_of(opts)
            )

        return self._by_dtype(start, [input_list, *output_lists], output_lists)

    def gather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Limit = None, *,
        root: int = 0,
    ) -> dist.Work:  # fmt: skip
        if isinstance(input_tensors, torch.Tensor):
            output_tensors = [output_tensors] if output_tensors else []
        opts = rooted_options(c10d.GatherOptions, opts, timeout, root)
        outputs = single_entry(output_tensors, "gather") if output_tensors else None
        work = cydist.gather(
            single_entry(input_tensors, "gather"),
            outputs,
            None,
            self.host,
            opts.asyncOp,
            opts.rootRank,
            timeout=timeout_of(opts),
        )
        return self._torch_work(work, outputs or [])

    def gather_single(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        opts = rooted_options(c10d.GatherOptions, opts, None, 0)
        here = self.rank() == opts.rootRank
        if here and output.numel() != self.size() * input.numel():
            raise ValueError(
                f"gather_single: an output of {counted(output.numel(), 'element')}, for "
                f"{counted(self.size(), 'rank')} with {input.numel()} each"
            )
        outputs = list(output.view(self.size(), *input.shape)) if here else None
        work = cydist.gather(
            input, outputs, None, self.host, opts.asyncOp, opts.rootRank, timeout=timeout_of(opts)
        )
        return self._torch_work(work, [output] if here else [])

    def scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Limit = None, *,
        root: int = 0,
    ) -> dist.Work:  # fmt: skip
        if isinstance(output_tensors, torch.Tensor):
            input_tensors = [input_tensors] if input_tensors else []
        opts = rooted_options(c10d.ScatterOptions, opts, timeout, root)
        tensor = single_entry(output_tensors, "scatter")
        inputs = single_entry(input_tensors, "scatter") if input_tensors else None
        work = cydist.scatter(
            tensor, inputs, None, self.host, opts.asyncOp, opts.rootRank, timeout=timeout_of(opts)
        )
        return self._torch_work(work, [tensor])

    def reduce_scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Limit = None, *,
        op: Any = None,
    ) -> dist.Work:  # fmt: skip
        if isinstance(output_tensors, torch.Tensor):
            input_tensors = [input_tensors]
        opts = options_of(c10d.ReduceScatterOptions, opts, timeout, op)
        output = single_entry(output_tensors, "reduce_scatter")
        work = cydist.reduce_scatter(
            output, single_entry(input_tensors, "reduce_scatter"), op_of(opts.reduceOp), self.host,
            opts.asyncOp, timeout=timeout_of(opts),
        )  # fmt: skip
        return self._torch_work(work, [output])

    def reduce_scatter_single(
        self, outputTensor: Any, inputTensor: Any, opts: Any = None
    ) -> dist.Work:
        opts = options_of(c10d.ReduceScatterOptions, opts, None)
        work = cydist.reduce_scatter_tensor(
            outputTensor, inputTensor, op_of(opts.reduceOp), self.host, opts.asyncOp,
            timeout=timeout_of(opts),
        )  # fmt: skip
        return self._torch_work(work, [outputTensor])

    def reduce_scatter_single_coalesced(
        self, outputTensors: Any, inputTensors: Any, opts: Any = None
    ) -> dist.Work:
        opts = options_of(c10d.ReduceScatterOptions, opts, None)
        kind = op_of(opts.reduceOp)

        def start(some: list[list[Any]]) -> Work | None:
            return cydist.reduce_scatter_tensor_coalesced(
                some[0], some[1], kind, self.host, opts.asyncOp, timeout=timeout_of(opts)
            )

        return self._by_dtype(start, [outputTensors, inputTensors], outputTensors)

    def alltoall(
        self, output_tensor: Any, input_tensor: Any, opts: Any = None, timeout: Limit = None
    ) -> dist.Work:
        opts = options_of(c10d.AllToAllOptions, opts, timeout)
        work = cydist.all_to_all(
            output_tensor, input_tensor, self.host, opts.asyncOp, timeout=timeout_of(opts)
        )
        return self._torch_work(work, output_tensor)

    def all_to_all_single(
        self, output_tensor: Any, input_tensor: Any, output_split_sizes: Any,
        input_split_sizes: Any, opts: Any = None, timeout: Limit = None,
    ) -> dist.Work:  # fmt: skip
        opts = options_of(c10d.AllToAllOptions, opts, timeout)
        work = cydist.all_to_all_single(
            output_tensor, input_tensor, output_split_sizes, input_split_sizes, self.host,
            opts.asyncOp, timeout=timeout_of(opts),
        )  # fmt: skip
        return self._torch_work(work, [output_tensor])

    def barrier(self, opts: Any = None, timeout: Limit = None) -> dist.Work:
        opts = options_of(c10d.BarrierOptions, opts, timeout)
        return self._torch_work(
            cydist.barrier(self.host, opts.asyncOp, timeout=timeout_of(opts)), []
        )

    def monitored_barrier(self, timeout: Limit = None, wait_all_ranks: bool = False) -> None:
        """Run a barrier that names the missing ranks.

        torch.distributed.monitored_barrier takes only gloo's groups: call this instead.
        """
        cydist.monitored_barrier(self.host, timeout, wait_all_ranks)

    # Messages.

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> dist.Work:
        tensor = single_entry(tensors, "send")
        work = cydist.isend(tensor, None, self.host, tag, dstRank)
        return self._torch_work(work, [tensor])

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> dist.Work:
        return self._receive(single_entry(tensors, "recv"), srcRank, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        return self._receive(single_entry(tensors, "recv_anysource"), None, tag)

    def _receive(self, tensor: Any, source: int | None, tag: int) -> dist.Work:
        work = cydist.irecv(tensor, None, self.host, tag, source)
        assert work is not None
        return self._torch_work(work, [tensor], self.host.get_group_rank)

    # Batches: torch collects some calls itself, and starts the rest one by one.

    def _start_coalescing(self, device: object) -> None:
        self._batch = []

    def _end_coalescing(self, device: object) -> dist.Work:
        batch, self._batch = self._batch, None
        return SeveralWorks(batch, []) if batch else DoneWork([])

    startCoalescing = _start_coalescing
    endCoalescing = _end_coalescing

    # Results.

    def _torch_work(
        self, work: Work | None, tensors: Any, group_rank: Callable[[int], int] | None = None
    ) -> dist.Work:
        """Return torch's Work for the result of one of cydist's calls."""
        if work is None:
            return BLOCKING
        pending = PendingWork(work, tensors, group_rank)
        if self._batch is not None:
            self._batch.append(pending)
        return pending

    def _by_dtype(
        self, start: Callable[[list[list[Any]]], Work | None], lists: list[Any], tensors: Any
    ) -> dist.Work:
        """Start one call per dtype on lists whose entries i belong together.

        Args:
            start: Takes the lists with the entries of one dtype.
            tensors: The tensors that the calls write.
        """
        columns = list(zip(*lists, strict=True))
        dtypes = dict.fromkeys(column[0].dtype for column in columns)
        if len(dtypes) == 1:
            return self._torch_work(start([list(each) for each in lists]), tensors)
        works = []
        for dtype in dtypes:
            some = [column for column in columns if column[0].dtype == dtype]
            made = start([list(each) for each in zip(*some, strict=True)])
            works.append(self._torch_work(made, tensors))
        return SeveralWorks(works, tensors)

    # Names from before torch 2.13, and one of 2.15.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    gather_into_tensor = gather_single


run_as_written(Group, DoneWork, PendingWork, SeveralWorks)
