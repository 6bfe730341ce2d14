"""Options of calls on a group object, under torch's names.

torch's own objects of these names are taken as well, without importing torch.
"""

from __future__ import annotations

from datetime import timedelta

from cydist.reduce_ops import Op, ReduceOp


class _CallOptions:
    """The options that every call takes.

    Attributes:
        timeout: Of the call, in seconds or as a timedelta; None: the group's.
        asyncOp: False: the call returns when it is complete.
    """

    __module__ = "cydist"
    __slots__ = ("asyncOp", "timeout")

    def __init__(self) -> None:
        self.timeout: float | timedelta | None = None
        self.asyncOp = True

    def __init_subclass__(cls) -> None:
        cls.__module__ = "cydist"


class _ReductionOptions(_CallOptions):
    __slots__ = ("reduceOp",)

    def __init__(self) -> None:
        super().__init__()
        self.reduceOp: Op = ReduceOp.SUM


class _RootOptions(_CallOptions):
    __slots__ = ("rootRank",)

    def __init__(self) -> None:
        super().__init__()
        self.rootRank = 0


class AllreduceOptions(_ReductionOptions):
    """Options of `allreduce` of a group.

    Attributes:
        reduceOp: The reduction; ReduceOp.SUM by default.
        timeout: Of the call, in seconds or as a timedelta; None: the group's.
        asyncOp: False: the call returns when it is complete.

    Examples:
        >>> options, x = dist.AllreduceOptions(), np.array([rank + 1.0])
        >>> options.reduceOp = dist.ReduceOp.MAX
        >>> assert dist.group.WORLD.allreduce([x], options).wait() and x == 2
    """

    __slots__ = ()


class AllreduceCoalescedOptions(_ReductionOptions):
    """Options of `allreduce_coalesced` of a group.

    Attributes:
        reduceOp: The reduction; ReduceOp.SUM by default.
        timeout: Of the call, in seconds or as a timedelta; None: the group's.
        asyncOp: False: the call returns when it is complete.

    Examples:
        >>> options, x = dist.AllreduceCoalescedOptions(), np.array([rank + 1.0])
        >>> options.reduceOp = dist.ReduceOp.MAX
        >>> assert dist.group.WORLD.allreduce_coalesced([x], options).wait() and x == 2
    """

    __slots__ = ()


class ReduceOptions(_ReductionOptions):
    """Options of `reduce` of a group.

    Attributes:
        rootRank: The rank in the group that gets the result; 0 by default.
        reduceOp: The reduction; ReduceOp.SUM by default.
        timeout: Of the call, in seconds or as a timedelta; None: the group's.
        asyncOp: False: the call returns when it is complete.

    Examples:
        >>> options, x = dist.ReduceOptions(), np.array([rank + 1.0])
        >>> options.rootRank = 1
        >>> assert dist.group.WORLD.reduce([x], options).wait() and x == (1, 3)[rank]
    """

    __slots__ = ("rootRank",)

    def __init__(self) -> None:
        super().__init__()
        self.rootRank = 0


class ReduceScatterOptions(_ReductionOptions):
    """Options of `reduce_scatter` of a group.

    Attributes:
        reduceOp: The reduction; ReduceOp.SUM by default.
        timeout: Of the call, in seconds or as a timedelta; None: the group's.
        asyncOp: False: the call returns when it is complete.

    Examples:
        >>> options, x = dist.ReduceScatterOptions(), np.empty(1)
        >>> options.timeout = 30
        >>> work = dist.group.WORLD.reduce_scatter([x], [[np.ones(1), np.ones(1)]], options)
        >>> assert work.wait() and x == 2
    """

    __slots__ = ()


class BroadcastOptions(_RootOptions):
    """Options of `broadcast` of a group.

    Attributes:
        rootRank: The root's rank in the group; 0 by default.
        timeout: Of the call, in seconds or as a timedelta; None: the group's.
        asyncOp: False: the call returns when it is complete.

    Examples:
        >>> options, x = dist.BroadcastOptions(), np.array([float(rank)])
        >>> options.rootRank = 1
        >>> assert dist.group.WORLD.broadcast([x], options).wait() and x == 1
    """

    __slots__ = ()


class GatherOptions(_RootOptions):
    """Options of `gather` of a group.

    Attributes:
        rootRank: The root's rank in the group; 0 by default.
        timeout: Of the call, in seconds or as a timedelta; None: the group's.
        asyncOp: False: the call returns when it is complete.

    Examples:
        >>> options, outputs = dist.GatherOptions(), [np.empty(1), np.empty(1)] if rank else None
        >>> options.rootRank = 1
        >>> work = dist.group.WORLD.gather([outputs] if rank else [], [np.ones(1)], options)
        >>> assert work.wait() and (not rank or outputs == [1, 1])
    """

    __slots__ = ()


class ScatterOptions(_RootOptions):
    """Options of `scatter` of a group.

    Attributes:
        rootRank: The root's rank in the group; 0 by default.
        timeout: Of the call, in seconds or as a timedelta; None: the group's.
        asyncOp: False: the call returns when it is complete.

    Examples:
        >>> options, x = dist.ScatterOptions(), np.empty(1)
        >>> options.rootRank = 1
        >>> given = [[np.zeros(1), np.ones(1)]] if rank else []
        >>> assert dist.group.WORLD.scatter([x], given, options).wait() and x == rank
    """

    __slots__ = ()


class AllgatherOptions(_CallOptions):
    """Options of `allgather` of a group.

    Attributes:
        timeout: Of the call, in seconds or as a timedelta; None: the group's.
        asyncOp: False: the call returns when it is complete.

    Examples:
        >>> options, outputs = dist.AllgatherOptions(), [np.empty(1), np.empty(1)]
        >>> options.timeout = 30
        >>> work = dist.group.WORLD.allgather([outputs], [np.array([float(rank)])], options)
        >>> assert work.wait() and outputs == [0, 1]
    """

    __slots__ = ()


class AllToAllOptions(_CallOptions):
    """Options of `alltoall` of a group.

    Attributes:
        timeout: Of the call, in seconds or as a timedelta; None: the group's.
        asyncOp: False: the call returns when it is complete.

    Examples:
        >>> options, outputs = dist.AllToAllOptions(), [np.empty(1), np.empty(1)]
        >>> options.timeout = 30
        >>> given = [np.array([float(rank)]), np.array([float(rank)])]
        >>> assert dist.group.WORLD.alltoall(outputs, given, options).wait() and outputs == [0, 1]
    """

    __slots__ = ()


class BarrierOptions(_CallOptions):
    """Options of `barrier` of a group.

    Attributes:
        timeout: Of the call, in seconds or as a timedelta; None: the group's.
        asyncOp: False: the call returns when it is complete.

    Examples:
        >>> options = dist.BarrierOptions()
        >>> options.timeout = 30
        >>> dist.group.WORLD.barrier(options).wait()
        True
    """

    __slots__ = ()
