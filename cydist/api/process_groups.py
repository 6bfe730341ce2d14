"""init_process_group, the groups made after it, and the only global state.

A process is one rank and has one world. With the backend "inproc" a thread is a rank, and each
such thread has a world of its own.
"""

from __future__ import annotations

import atexit
import importlib
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import cache
from operator import index
from typing import TYPE_CHECKING, Any

from cydist import config, logs
from cydist._native import arm_failpoint, begin_counters_at, fast_collectives, use_isa
from cydist.api import torch_hints
from cydist.errors import DistBackendError, GroupFailedError, warn_user
from cydist.group_names import DEFAULT_GROUP, GroupName
from cydist.groups import registry
from cydist.groups.process_group import ProcessGroup
from cydist.groups.world import World, typed_errors
from cydist.waiting import DEFAULT_TIMEOUT, seconds

if TYPE_CHECKING:
    from cydist.stores import Store


class NonMember:
    """The result of new_group on a rank that is not in the group: falsy, rank and size -1."""

    _warned: set[str]

    def __init__(self) -> None:
        self._warned = set()

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "GroupMember.NON_GROUP_MEMBER"

    def rank(self) -> int:
        """Return -1: this process is not in the group."""
        return -1

    def size(self) -> int:
        """Return -1: this process does not know the size."""
        return -1

    def warn(self, name: str) -> None:
        """Warn, once for each kind of call, that the call does nothing here."""
        if name not in self._warned:
            self._warned.add(name)
            warn_user(f"{name} on a group that this rank is not in does nothing", UserWarning)


class _GroupMeta(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:
        """Return the default group; None before init_process_group."""
        world = _current_world()
        return None if world is None else world.groups[DEFAULT_GROUP]


class GroupMember(metaclass=_GroupMeta):
    """torch.distributed's names for "the default group" and "not in the group".

    Attributes:
        WORLD: The default group; None while there is none.
        NON_GROUP_MEMBER: What `new_group` returns on a rank that is not in the group.

    Examples:
        >>> other = dist.new_group([1 - rank], use_local_synchronization=True)
        >>> assert other is dist.GroupMember.NON_GROUP_MEMBER
    """

    __module__ = "cydist"

    NON_GROUP_MEMBER = NonMember()


class group(metaclass=_GroupMeta):
    """The default group, under torch.distributed's name.

    Attributes:
        WORLD: The default group; None while there is none.

    Examples:
        >>> dist.group.WORLD.size()
        2
    """

    __module__ = "cydist"


AnyGroup = ProcessGroup | NonMember | None

SHRINK_DEFAULT = 0
SHRINK_ABORT = 1

_process: World | None = None
_thread = threading.local()
_threads_are_ranks = False  # or were
_default_group: ProcessGroup | None = None  # None: it depends on the thread, or there is none


def _current_world() -> World | None:
    world: World | None = getattr(_thread, "world", None)
    return _process if world is None else world


def current_world() -> World:
    """Return the world of this rank. Raises ValueError before init_process_group."""
    world = _current_world()
    if world is None:
        raise ValueError(
            "the default process group has not been initialized: call init_process_group first"
        )
    return world


def thread_is_rank() -> None:
    """Make this thread a rank of its own from now on, with any backend. For tests."""
    _thread.is_rank = True
    logs.thread_is_rank()


def _set_world(world: World | None, per_thread: bool) -> None:
    global _process, _threads_are_ranks
    if per_thread or getattr(_thread, "is_rank", False):
        _thread.world = world
        _threads_are_ranks = True
    else:
        _process = world
    _set_fast_path_default()


@contextmanager
def as_rank_of(world: World) -> Iterator[None]:
    """Let this thread make calls for the rank whose world this is."""
    before = getattr(_thread, "world", None)
    _thread.world = world
    try:
        yield
    finally:
        _thread.world = before


def swap_world(other: World | None) -> World | None:
    """Make `other` this process's world, and return the previous one. For tests with several
    worlds."""
    before = _process
    _set_world(other, per_thread=False)
    return before


def replace_group(old: ProcessGroup, new: ProcessGroup) -> None:
    """Replace `old`, which ends, by `new`."""
    current_world().replace(old, new)
    _set_fast_path_default()


def _set_fast_path_default() -> None:
    """Tell the fast path which group None means, unless that depends on the thread."""
    global _default_group
    alone = _process is not None and not _threads_are_ranks
    _default_group = _process.groups.get(DEFAULT_GROUP) if alone and _process else None
    fast_collectives.use_default(_default_group)


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: float | timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: object = None,
    device_id: object = None,
    *,
    allow_pickle: bool = True,
    torch: bool = False,
) -> None:
    """Join the job and make the default group. Blocks until all ranks have joined.

    Args:
        backend: "tcp" ("gloo" means the same), "mpi", "nccl", "inproc", a registered one, or one
            for each kind of memory: "cpu:tcp,cuda:nccl". None: "mpi" under an MPI launcher if
            mpi4py is installed, else "tcp"; and "nccl" for arrays on GPUs, if cupy and NCCL are
            installed and the process has imported cupy or used torch on a GPU.
        init_method: "env://" (the default), "tcp://host:port" or "file:///path". Not with `store`.
        timeout: The most time that a call may take, in seconds or as a timedelta; 30 minutes by
            default.
        world_size: Number of ranks, unless the launcher or the URL gives it. 0 with backend "mpi":
            the launcher's number, and the launcher's rank.
        rank: This process's rank, unless the launcher or the URL gives it.
        store: An explicit store, which needs `rank` and `world_size`.
        group_name: Separates jobs that meet at one address or file.
        pg_options: For the backend.
        device_id: The group's `bound_device_id`, as in torch. Calls use the device of their arrays.
        allow_pickle: Whether object collectives may pickle objects that their own codec cannot
            encode.
        torch: Whether to make torch.distributed's default group, too, of the same ranks and over
            the same links and memory. DistributedDataParallel and all that is built on
            torch.distributed use it. Needs backend "tcp". `destroy_process_group` ends it. Without
            it torch's tools find no group, also where torch is imported.

    Raises:
        ValueError: The arguments contradict each other, or there is a default group already (with
            torch=True also torch's).
        RendezvousError: Ranks are missing at the timeout, or ask for different backends; the
            message lists them.
        PeerFailedError: A rank died meanwhile.
        AuthenticationError: The ranks do not share one secret.
        DistNetworkError: This rank gets no port, descriptor or file.

    Examples:
        >>> # in each process that cydistrun, torchrun, mpirun or srun has started
        >>> dist.init_process_group("tcp", timeout=60)  # doctest: +SKIP
    """
    # These load sockets and cryptography, which `import cydist` alone does not need.
    from cydist.rendezvous import handlers
    from cydist.tuning import file as tuning_file

    if _current_world() is not None:
        raise ValueError(
            "trying to initialize the default process group twice! Call destroy_process_group() "
            "first"
        )
    limit = seconds(DEFAULT_TIMEOUT if timeout is None else timeout, "init_process_group")
    assert limit is not None
    spec = registry.canonical(handlers.default_backend() if backend is None else backend)
    apply_settings()
    if spec == "inproc":
        logs.thread_is_rank()
    bridge: Any = None
    if torch:  # by name, since the bridge is built on this module
        bridge = importlib.import_module("cydist.interop.torch.shared")
        bridge.check_sharing(spec)
    with typed_errors("init_process_group", rank):
        ranks_store, rank, world_size = handlers.rendezvous(
            init_method, rank=rank, world_size=world_size, store=store,
            timeout=limit, group_name=group_name, backend=spec,
        )  # fmt: skip
    world = World(ranks_store, rank, world_size, limit, spec, owns_store=store is None)
    world.allow_pickle = allow_pickle
    try:
        with ranks_store.report_error(rank):
            tuning_file.share_from_rank_0(ranks_store, rank)
        made = world.make(range(world_size), DEFAULT_GROUP, spec, limit, pg_options)
        made.bound_device_id = device_id
        if bridge is not None:
            bridge.share(world)
        with ranks_store.report_error(rank):
            ranks_store.let_server_leave_last(rank, world_size)
    except BaseException:
        world.end()
        raise
    _set_world(world, per_thread=spec == "inproc")
    _hint_at_exit()


@cache
def _hint_at_exit() -> None:
    """Let the process end with a hint after an error of torch, while cydist's stores still serve:
    what is registered last runs first."""
    atexit.register(_write_hint)


def _write_hint() -> None:
    error = getattr(sys, "last_value", None)
    if error is not None and _current_world() is not None:
        from cydist.stores.tcp_server import servers

        torch_hints.write_hint(error, [each.port for each in servers])


def apply_settings() -> None:
    """Apply CYDIST_LOG, CYDIST_ISA, CYDIST_FAILPOINT and CYDIST_FIRST_COUNT. (The best ISA of this
    machine is the default.) Raises ValueError for invalid values of these and of
    CYDIST_TRANSPORT."""
    from cydist.backends.host.shm_setup import transport

    logs.configure()
    transport()  # an invalid value fails before any rank waits
    arm_failpoint(config.FAILPOINT.get().strip())
    if first := config.FIRST_COUNT.get().strip():
        if not (first.isdecimal() and int(first) < 1 << 64):
            raise ValueError(
                f"CYDIST_FIRST_COUNT={first}: it must be an integer from 0 to 2**64 - 1"
            )
        begin_counters_at(int(first))
    isa = config.ISA.get().strip()
    try:
        if isa:
            use_isa(isa)
    except ValueError as error:
        raise ValueError(f"CYDIST_ISA={isa}: {error}") from None


def is_initialized() -> bool:
    """Return whether the default group exists: init_process_group was called, and it was not
    destroyed.

    Returns:
        True from the end of init_process_group to destroy_process_group.

    Examples:
        >>> dist.is_initialized()
        True
    """
    return _current_world() is not None


def destroy_process_group(group: AnyGroup = None) -> None:
    """Destroy a group; None destroys all groups and leaves the job.

    A group may be destroyed twice. Calls on it raise GroupDestroyedError.

    Args:
        group: A group from `new_group`; None is the default group.

    Raises:
        MismatchError: The ranks find only now that their last calls differed. On backend "mpi", for
            example, a call may end before it is compared. The groups are destroyed all the same.

    Examples:
        >>> pair = dist.new_group([0, 1])
        >>> dist.destroy_process_group(pair)
    """
    check_group(group, "destroy_process_group")
    if isinstance(group, NonMember):
        return
    world = current_world()
    if group is not None and group is not world.groups.get(DEFAULT_GROUP):
        if world.groups.get(group.group_name) is group:  # it may belong to an earlier world
            del world.groups[group.group_name]
        group.destroy()
        return
    with ExitStack() as leaving:  # all groups, the last one first, even if one raises
        leaving.callback(_set_world, None, per_thread=getattr(_thread, "world", None) is world)
        leaving.callback(world.end)


def resolve_group(group: AnyGroup, name: str = "") -> ProcessGroup | None:
    """Return the group of a call (None means the default group), or None if this rank is not in it.
    Raises TypeError, which names the call, if `group` is not a group."""
    if group is None:
        return current_world().groups[DEFAULT_GROUP]
    if isinstance(group, ProcessGroup):
        return group
    check_group(group, name)
    return None


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: float | timedelta | None = None,
    backend: str | None = None,
    pg_options: object = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: object = None,
    sort_ranks: bool = True,
) -> ProcessGroup | NonMember:
    """Make a group of some global ranks. Moves no data.

    If the default group has another backend, the first group of backend "mpi" waits for all ranks,
    members or not. A rank that asks for the default group's backend ("tcp", "inproc" or "mpi")
    waits for no other. If ranks ask for different ones it still gets a group, and its calls on that
    group raise MismatchError.

    Args:
        ranks: Global ranks; None: all. Sorted unless `sort_ranks` is False.
        timeout: As init_process_group's; None: the default group's.
        backend: None: the default group's.
        pg_options: For the backend.
        use_local_synchronization: Only the members call; not on backend "mpi". False: every rank of
            the world calls new_group, in the same order, members or not.
        group_desc: What messages call the group. Its name by default.
        device_id: The group's `bound_device_id`, as in torch. Calls use the device of their arrays.
        sort_ranks: False: group ranks follow the order of `ranks`.

    Returns:
        The group, or GroupMember.NON_GROUP_MEMBER if this rank is not in it.

    Raises:
        TypeError: Ranks are not integers. Nothing has happened, and you can call it again.
        ValueError: Ranks are unknown or repeated, the timeout is wrong, or
            `use_local_synchronization` is set on "mpi". Nothing has happened, and you can call it
            again.
        RendezvousError: The ranks ask for different backends.

    Examples:
        >>> evens = dist.new_group([0])
        >>> assert dist.get_rank(evens) == (0, -1)[rank]
    """
    world = current_world()
    world.groups[DEFAULT_GROUP].check_process("new_group")
    given = seconds(timeout, "new_group")
    limit = world.timeout if given is None else given
    try:
        members = tuple(range(world.size)) if ranks is None else tuple(map(index, ranks))
    except TypeError:
        raise TypeError(
            f"new_group: ranks must be a list of global ranks, or None, not {ranks!r}"
        ) from None
    if sort_ranks:
        members = tuple(sorted(members))
    seen: set[int] = set()
    for member in members:
        if not 0 <= member < world.size:
            raise ValueError(
                f"new_group: {member} is not a global rank: the job has ranks 0 to {world.size - 1}"
            )
        if member in seen:
            raise ValueError(f"new_group: rank {member} is listed twice")
        seen.add(member)
    if not members:
        raise ValueError("new_group: a group needs at least one rank")
    spec = registry.canonical(world.spec if backend is None else backend)
    devices = registry.parse(spec)
    if use_local_synchronization:
        if "mpi" in devices.values():
            raise ValueError(
                "new_group: backend 'mpi' has no use_local_synchronization: let every rank of the "
                "world call new_group without it, or use backend 'tcp'"
            )
        if world.rank not in members:
            return GroupMember.NON_GROUP_MEMBER
        name = world.members_name(f"{world.prefix}local", members)
    else:
        world.made += 1
        name = f"{world.prefix}{world.made}"
    name = GroupName(name, group_desc)
    if world.rank not in members:
        if not any(registry.find(each).of_all for each in devices.values()):
            world.groups[DEFAULT_GROUP].announce_request(name, spec)
        world.make_parents(devices.values(), name, limit)
        return GroupMember.NON_GROUP_MEMBER
    made = world.make(members, name, spec, limit, pg_options)
    made.bound_device_id = device_id
    return made


def shrink_group(
    ranks_to_exclude: Iterable[int] | None = None,
    group: AnyGroup = None,
    shrink_flags: int = SHRINK_DEFAULT,
    pg_options: Any = None,
    *,
    timeout: float | timedelta | None = None,
) -> ProcessGroup | NonMember:
    """Replace `group` by a new group of the members that are neither excluded nor dead.

    Every remaining member calls this; the group may have failed. They agree on the members of the
    new group: a rank is left out if one of them excludes it, or finds it dead before the new group
    exists. A barrier on the new group ends the call.

    A network that falls apart looks like many deaths, so each part makes a group of its own. After
    the call compare get_world_size() with what the job needs: one part at most has more than half.

    The old group is destroyed. All other groups stay as they are, with the global ranks that they
    were made with. When the default group is shrunk, its ranks are renumbered from 0: get_rank,
    get_world_size, new_group, and global ranks in calls on the new groups use the new numbers.

    Args:
        ranks_to_exclude: Ranks of `group`. None: only dead ranks are excluded, if there are any.
        group: The group to replace. None: the default group; the new group then becomes the default
            group.
        shrink_flags: SHRINK_ABORT first ends all calls under way on `group` with an error. With
            SHRINK_DEFAULT they end when the new group exists.
        pg_options: For the backend.
        timeout: Seconds or a timedelta that the other ranks have to call this too; None takes the
            group's.

    Returns:
        The new group, or GroupMember.NON_GROUP_MEMBER on a rank that was not in the old one.

    Raises:
        TypeError: `ranks_to_exclude` is not a list of integers. Nothing has happened then.
        ValueError: The list is empty, names a rank twice, an unknown rank or all ranks, or the
            group has one rank. Nothing has happened then.
        UnsupportedError: The backend cannot do it. Nothing has happened then.
        DistBackendError: This rank is excluded, by its own list or another's.
        DistTimeoutError: Ranks neither called nor died; the message names them. You can call it
            again.

    Examples:
        >>> pair = dist.new_group([0, 1])
        >>> if rank == 0:
        ...     alone = dist.shrink_group([1], pair)
        ...     assert alone.size() == 1
    """
    if (chosen := usable_group(group, "shrink_group")) is None:
        return GroupMember.NON_GROUP_MEMBER
    if shrink_flags not in (SHRINK_DEFAULT, SHRINK_ABORT):
        raise ValueError(
            f"shrink_group: shrink_flags must be SHRINK_DEFAULT ({SHRINK_DEFAULT}) or "
            f"SHRINK_ABORT ({SHRINK_ABORT}), not {shrink_flags!r}"
        )
    excluded = () if ranks_to_exclude is None else _excluded_ranks(ranks_to_exclude, chosen)
    if chosen.size() < 2:
        raise ValueError(f"shrink_group: {chosen.title} has one rank, and at least one must remain")
    if chosen.rank() in excluded:
        raise DistBackendError(
            f"shrink_group: this rank ({chosen.rank()} of {chosen.title}) is in "
            "ranks_to_exclude: only those call it that go on",
            op="shrink_group", group=chosen.group_name,
            ranks=(chosen.ranks[chosen.rank()],),
        )  # fmt: skip
    with suppress(GroupFailedError):  # a failed group is allowed: this function is for those
        chosen.check_usable("shrink_group")
    made = chosen.shrink(
        excluded, chosen.deadline(timeout, "shrink_group"), abort=shrink_flags == SHRINK_ABORT,
        pg_options=pg_options,
    )  # fmt: skip
    replace_group(chosen, made)
    return made


def _excluded_ranks(ranks: Iterable[int], group: ProcessGroup) -> tuple[int, ...]:
    """Return the list as integers. Raises TypeError and ValueError."""
    try:
        excluded = tuple(index(rank) for rank in ranks)
    except TypeError:
        raise TypeError(
            f"shrink_group: ranks_to_exclude must be a list of ranks of the group, or None, not "
            f"{ranks!r}"
        ) from None
    if not excluded:
        raise ValueError(
            "shrink_group: ranks_to_exclude is empty: pass None to exclude only ranks that are dead"
        )
    for rank in excluded:
        if not 0 <= rank < group.size():
            raise ValueError(
                f"shrink_group: ranks_to_exclude has {rank}, and {group.title} has "
                f"ranks 0 to {group.size() - 1}"
            )
    if len(set(excluded)) != len(excluded):
        raise ValueError(f"shrink_group: ranks_to_exclude names a rank twice: {list(excluded)}")
    if len(excluded) == group.size():
        raise ValueError("shrink_group: ranks_to_exclude has all ranks; at least one must remain")
    return excluded


# Queries.


def get_rank(group: AnyGroup = None) -> int:
    """Return this process's rank in the group; -1 if it is not a member.

    Args:
        group: A group from `new_group`; None is the default group.

    Returns:
        0 to p - 1, or -1.

    Raises:
        ValueError: There is no default group.

    Examples:
        >>> assert dist.get_rank() == rank
    """
    found = resolve_group(group)
    return -1 if found is None else found.rank()


def get_world_size(group: AnyGroup = None) -> int:
    """Return how many ranks the group has; -1 if this process is not a member.

    Args:
        group: A group from `new_group`; None is the default group.

    Returns:
        The number of ranks, or -1.

    Raises:
        ValueError: There is no default group.

    Examples:
        >>> dist.get_world_size()
        2
    """
    found = resolve_group(group)
    return -1 if found is None else found.size()


def _members_only(group: AnyGroup, what: str) -> ProcessGroup:
    found = resolve_group(group)
    if found is None:
        raise ValueError(f"{what}: this rank is not in the group")
    return found


def get_backend(group: AnyGroup = None) -> str:
    """Return the name of the group's backend.

    Args:
        group: A group from `new_group`; None is the default group.

    Returns:
        The name, in lower case. For a group with a backend for each kind of memory: all of them, as
        init_process_group takes them.

    Raises:
        ValueError: This rank is not in the group, or there is no default group.

    Examples:
        >>> dist.get_backend()
        'tcp'
    """
    return _members_only(group, "get_backend").backend


def get_backend_config(group: AnyGroup = None) -> str:
    """Return the backend of each kind of memory that the group takes.

    Args:
        group: A group from `new_group`; None is the default group.

    Returns:
        Pairs of device and backend, such as "cpu:tcp,cuda:tcp".

    Raises:
        ValueError: This rank is not in the group, or there is no default group.

    Examples:
        >>> dist.get_backend_config()
        'cpu:tcp,cuda:tcp'
    """
    found = _members_only(group, "get_backend_config")
    pairs = [(device, found.for_device(device).backend) for device in found.devices]
    return ",".join(f"{device}:{backend}" for device, backend in pairs)


def get_group_rank(group: AnyGroup, global_rank: int) -> int:
    """Return the group rank of a global rank.

    Args:
        group: A group from `new_group`; None is the default group.
        global_rank: A rank of the world.

    Returns:
        The member's rank in the group.

    Raises:
        ValueError: It is not a member, or this rank is not.

    Examples:
        >>> swapped = dist.new_group([1, 0], sort_ranks=False)
        >>> dist.get_group_rank(swapped, 1)
        0
    """
    return _members_only(group, "get_group_rank").get_group_rank(global_rank)


def get_global_rank(group: AnyGroup, group_rank: int) -> int:
    """Return the global rank of a group rank.

    Args:
        group: A group from `new_group`; None is the default group.
        group_rank: A rank of the group, from 0.

    Returns:
        The member's rank in the world.

    Raises:
        ValueError: There is no such rank, or this rank is not in the group.

    Examples:
        >>> swapped = dist.new_group([1, 0], sort_ranks=False)
        >>> dist.get_global_rank(swapped, 0)
        1
    """
    found = _members_only(group, "get_global_rank")
    if not 0 <= group_rank < found.size():
        raise ValueError(f"{found.title} has ranks 0 to {found.size() - 1}, not {group_rank}")
    return found.ranks[group_rank]


def get_process_group_ranks(group: AnyGroup) -> list[int]:
    """Return the members' global ranks, by group rank.

    Args:
        group: A group from `new_group`; None is the default group.

    Returns:
        A new list.

    Raises:
        ValueError: This rank is not in the group.

    Examples:
        >>> dist.get_process_group_ranks(None)
        [0, 1]
    """
    return list(_members_only(group, "get_process_group_ranks").ranks)


def get_pg_count() -> int:
    """Return how many groups this rank is in.

    Returns:
        The number of groups, the default group among them; 0 before init_process_group.

    Examples:
        >>> before = dist.get_pg_count()
        >>> pair = dist.new_group()
        >>> dist.get_pg_count() - before
        1
    """
    world = _current_world()
    return 0 if world is None else len(world.groups)


def abort(group: AnyGroup = None) -> None:
    """End every call under way on the group with an error, at once. The group has failed then.

    Args:
        group: A group from `new_group`; None is the default group.

    Raises:
        ValueError: This rank is not in the group.
        ForkedError: This process is a forked child of the rank.

    Examples:
        >>> doomed = dist.new_group([0, 1])
        >>> work = dist.irecv(np.empty(1), src=1 - rank, group=doomed)
        >>> dist.abort(doomed)  # work.wait() raises now
        >>> assert isinstance(work.exception(), dist.DistError)
    """
    chosen = _members_only(group, "abort")
    chosen.check_process("abort")
    chosen.abort()


def check_group(group: Any, name: str = "") -> None:
    """Raise TypeError if this is not a group, but a rank or a list in its place.

    Args:
        name: The call, for messages; "": it needs none.
    """
    call = f"{name}: " if name else ""
    if not (group is None or isinstance(group, ProcessGroup | NonMember)):
        if isinstance(getattr(group, "host", None), ProcessGroup):
            raise TypeError(
                f"{call}group is torch's, not cydist's: pass its attribute `host`, the cydist "
                f"group that it communicates through, in place of {group!r}"
            )
        raise TypeError(f"{call}group must come from cydist's new_group, not {group!r}")


def usable_group(group: AnyGroup, name: str) -> ProcessGroup | None:
    """Return the group for a call, or None if this rank is not in it (warns once)."""
    if group is None and _default_group is not None:
        return _default_group
    found = resolve_group(group, name)
    if found is None and isinstance(group, NonMember):
        group.warn(name)
    return found
