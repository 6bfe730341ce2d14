"""Backends by name: registered by a call, as cydist's own are, or installed as a package."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from cydist import config
from cydist.errors import UnsupportedError
from cydist.group_names import GroupName

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

    from cydist.groups.process_group import ProcessGroup
    from cydist.stores import MembershipStore

ENTRY_POINTS = "cydist.backends"
DEFAULT_DEVICES = ("cpu", "cuda")

# The version of a backend's interface: ProcessGroup, Work, Array, BackendOptions. It grows with
# every change that a backend must follow, not with changes that it may ignore.
INTERFACE_VERSION = 2


class BackendOptions(NamedTuple):
    """The first argument of a creator with `extended_api`.

    Attributes:
        store: The group's own part of the store, in which members can meet.
        group_rank, group_size: This process's rank in the group, and how many ranks it has.
        timeout: Default time limit of a call, in seconds.
        group_id: The group's name.
        global_ranks_in_group: The members' global ranks, by group rank; empty: all ranks.
    """

    store: MembershipStore
    group_rank: int
    group_size: int
    timeout: float
    group_id: str
    global_ranks_in_group: Sequence[int] = ()


class Plugin:
    """A registered backend: its creator, and the kinds of memory that it takes.

    Args:
        of_all: Whether its groups share one group of all ranks, which the first new_group makes if
            needed.
        requires: Packages that it imports at first use.
        encrypts: Whether it encrypts what it sends to other hosts where CYDIST_ENCRYPT=1 is set.
    """

    __slots__ = ("create", "devices", "encrypts", "extended_api", "of_all", "requires")

    def __init__(
        self,
        create: Callable[..., ProcessGroup],
        extended_api: bool,
        devices: tuple[str, ...],
        of_all: bool = False,
        requires: tuple[str, ...] = (),
        encrypts: bool = False,
    ) -> None:
        self.create = create
        self.extended_api = extended_api
        self.devices = devices
        self.of_all = of_all
        self.requires = requires
        self.encrypts = encrypts


class Family(Protocol):
    """Backends whose names have a colon, such as "torch:gloo". `member` takes the name after the
    colon.

    `member` returns a function that makes groups, like `func` of register_backend. Its attributes
    `extended_api` and `devices` give the rest.
    """

    def member(self, name: str) -> Callable[..., ProcessGroup]: ...


_plugins: dict[str, Plugin] = {}
_families: dict[str, Family] = {}


class _BackendType(type):
    """The class of Backend, with torch's tables of what is registered."""

    @property
    def backend_list(cls) -> list[str]:
        """Return "undefined" and the names of registered backends."""
        return ["undefined", *_plugins]

    @property
    def backend_capability(cls) -> dict[str, list[str]]:
        """Return the kinds of memory that each registered backend takes."""
        return {name: list(plugin.devices) for name, plugin in _plugins.items()}

    @property
    def default_device_backend_map(cls) -> dict[str, str]:
        """Return the backend that serves each kind of memory where none is asked for."""
        return {"cpu": "tcp", "cuda": "nccl"}


class Backend(str, metaclass=_BackendType):
    """A backend's name, in lower case.

    Attributes name the known ones (``Backend.TCP``). `Backend.backend_list` and
    `Backend.backend_capability` list what is registered, and `default_device_backend_map` what
    serves which memory by default, as in torch. An unknown name is accepted here and refused
    when a group is made with it, since a package may still register it.

    Examples:
        >>> dist.Backend("TCP") == dist.Backend.TCP == "tcp"
        True
    """

    __module__ = "cydist"

    UNDEFINED: ClassVar[str] = "undefined"
    # torch's, for programs that compare names. No backend is registered under these.
    UCC: ClassVar[str] = "ucc"
    XCCL: ClassVar[str] = "xccl"
    FAKE: ClassVar[str] = "fake"
    # For type checkers: register_backend sets these, and those of other backends.
    TCP: ClassVar[str]
    GLOO: ClassVar[str]
    INPROC: ClassVar[str]
    MPI: ClassVar[str]
    NCCL: ClassVar[str]

    def __new__(cls, name: str) -> Backend:
        if not isinstance(name, str):
            raise ValueError(f"a backend's name is a string, not {name!r}")
        return super().__new__(cls, name.lower())

    @classmethod
    def register_backend(
        cls,
        name: str,
        func: Callable[..., ProcessGroup] | Family,
        extended_api: bool = False,
        devices: str | Sequence[str] | None = None,
    ) -> None:
        """Register `func` as the backend called `name`.

        Args:
            name: How users ask for it, in lower case.
            func: Makes a group: ``func(store, rank, world_size, timeout)``, with a timedelta; or,
                with `extended_api`, ``func(options, pg_options)`` with BackendOptions. Its
                attribute `interface_version` is the version of cydist's interface that it was
                written for; without one, the present one. `requires` names the packages that it
                imports when it is used. `of_all` is True if all its groups share one of all ranks.
                `encrypts` is True if it encrypts what it sends to other hosts where
                CYDIST_ENCRYPT=1 is set. Or a Family.
            extended_api: Which of the two ways `func` is called.
            devices: Kinds of memory it takes, "cpu" or ["cpu", "cuda"]; None: both.

        Raises:
            ValueError: The name is taken.
            UnsupportedError: The backend was written for another version of the interface.

        Examples:
            >>> def make(store, rank, world_size, timeout):
            ...     raise NotImplementedError  # return a ProcessGroup
            >>> dist.register_backend("example", make, devices="cpu")
            >>> dist.is_backend_available("example")
            True
        """
        key = str(cls(name))
        if key in _plugins or key in _families:
            raise ValueError(f"a backend called {key!r} is registered already")
        _check_version(key, func)
        if callable(func):
            _plugins[key] = _plugin(func, extended_api, devices)
            setattr(cls, key.upper(), key)
        else:
            _families[key] = func


register_backend = Backend.register_backend


def _plugin(
    create: Callable[..., ProcessGroup], extended_api: bool, devices: str | Sequence[str] | None
) -> Plugin:
    """Return a backend, with the attributes of its creator."""
    return Plugin(
        create,
        extended_api,
        (devices,) if isinstance(devices, str) else tuple(devices or DEFAULT_DEVICES),
        of_all=getattr(create, "of_all", False),
        requires=tuple(getattr(create, "requires", ())),
        encrypts=getattr(create, "encrypts", False),
    )


def _check_version(name: str, create: Callable[..., ProcessGroup] | Family) -> None:
    stated = getattr(create, "interface_version", INTERFACE_VERSION)
    if stated == INTERFACE_VERSION:
        return
    from cydist.config import __version__

    where = f"{getattr(create, '__module__', '')}.{getattr(create, '__qualname__', create)}"
    newer = isinstance(stated, int) and stated > INTERFACE_VERSION
    raise UnsupportedError(
        f"backend {name!r} ({where}) was written for version {stated!r} of cydist's interface for "
        f"backends, and this is cydist {__version__}, which has version {INTERFACE_VERSION}: "
        f"install a later release of {'cydist' if newer else 'the backend'}"
    )


def names() -> list[str]:
    """Return the names of all backends, registered or installed."""
    return sorted({*_plugins, *(point.name.lower() for point in _installed())})


def _installed() -> EntryPoints:
    from importlib.metadata import entry_points  # slow and rarely needed

    return entry_points(group=ENTRY_POINTS)


def find(name: str) -> Plugin:
    """Return the backend called `name`; "torch:gloo" is the one that torch calls "gloo".

    An installed package is found by its entry point in the group "cydist.backends": a
    creator as in register_backend, with optional attributes `extended_api` and `devices`. Raises
    ValueError, which lists the known names.
    """
    key = name.lower()
    if key in _plugins:
        return _plugins[key]
    family, _, one = key.partition(":")
    if family in _families and one:
        make: Any = _families[family].member(one)
        return _plugin(make, getattr(make, "extended_api", False), getattr(make, "devices", None))
    for point in _installed():
        if point.name.lower() == key:
            create: Any = point.load()
            if key not in _plugins:  # loading may have registered it
                Backend.register_backend(
                    key,
                    create,
                    getattr(create, "extended_api", False),
                    getattr(create, "devices", None),
                )
            return _plugins[key]
    families = ", ".join(f"{each}:NAME" for each in _families)
    raise ValueError(f"no backend is called {name!r}; there are: {', '.join(names())}, {families}")


def is_available() -> bool:
    """Return True: cydist can be used, since it has been imported.

    Returns:
        True.

    Examples:
        >>> dist.is_available()
        True
    """
    return True


def is_backend_available(backend: str) -> bool:
    """Return whether there is a backend of that name, and the packages that it needs are installed.

    Args:
        backend: A name, in any case.

    Returns:
        True or False. Nothing is imported for it.

    Examples:
        >>> dist.is_backend_available("tcp"), dist.is_backend_available("carrier_pigeon")
        (True, False)
    """
    name = backend.lower()
    if name.partition(":")[0] in _families:
        try:
            find(name)
        except (ValueError, UnsupportedError):
            return False
        return True
    if name not in _plugins:
        return name in names()
    if all(importlib.util.find_spec(package) for package in _plugins[name].requires):
        return True
    return name == "nccl" and _has_torch_for_cuda()


def _has_torch_for_cuda() -> bool:
    """Return whether the installed torch works on GPUs, without an import of it."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    return os.path.exists(os.path.join(os.path.dirname(found.origin), "lib/libtorch_cuda.so"))


def is_gloo_available() -> bool:
    """Return whether the backend "gloo" (another name of "tcp") exists: always True.

    Returns:
        True.

    Examples:
        >>> dist.is_gloo_available()
        True
    """
    return is_backend_available("gloo")


def is_mpi_available() -> bool:
    """Return whether mpi4py is installed, which the backend "mpi" needs. mpi4py is not imported.

    Returns:
        True or False.

    Examples:
        >>> backend = "mpi" if dist.is_mpi_available() else "tcp"
    """
    return is_backend_available("mpi")


def is_ucc_available() -> bool:
    """Return whether a backend called "ucc" exists: cydist has none of its own.

    Returns:
        True if a package has registered one.

    Examples:
        >>> dist.is_ucc_available()
        False
    """
    return is_backend_available("ucc")


def is_xccl_available() -> bool:
    """Return whether a backend called "xccl" exists: cydist has none of its own.

    Returns:
        True if a package has registered one.

    Examples:
        >>> dist.is_xccl_available()
        False
    """
    return is_backend_available("xccl")


def get_default_backend_for_device(device: object) -> str:
    """Return the backend that serves arrays of a device where none is asked for.

    Args:
        device: "cpu", "cuda", "cuda:0", or torch's device.

    Returns:
        The name.

    Raises:
        ValueError: No backend serves such a device by default.

    Examples:
        >>> dist.get_default_backend_for_device("cpu")
        'tcp'
    """
    kind = str(getattr(device, "type", device)).partition(":")[0]
    found = Backend.default_device_backend_map.get(kind)
    if found is None:
        raise ValueError(
            f"get_default_backend_for_device: no backend serves {device!r} by default; there are "
            f"{', '.join(Backend.default_device_backend_map)}"
        )
    return found


def is_nccl_available() -> bool:
    """Return whether cupy or a torch for CUDA is installed, one of which the backend "nccl" needs.

    Neither is imported, and no GPU is looked for before a group is made.

    Returns:
        True or False.

    Examples:
        >>> backend = "nccl" if dist.is_nccl_available() else "tcp"
    """
    return is_backend_available("nccl")


def _is_name(text: str) -> bool:
    """Return whether this can be a backend's name, rather than pairs of device and name."""
    family, colon, one = text.lower().partition(":")
    return not colon or (family in _families and ":" not in one and "," not in one)


def parse(spec: str) -> dict[str, str]:
    """Return a backend string as device -> backend name.

    "tcp" gives that backend for every device it takes; "cpu:tcp,cuda:nccl" names each device. A
    backend's name may belong to a family: "torch:gloo", "cpu:torch:gloo".
    Raises ValueError for a malformed pair, a device named twice, a backend that does not
    take the device.
    """
    if _is_name(spec):
        return dict.fromkeys(find(spec).devices, spec.lower())
    devices: dict[str, str] = {}
    for pair in spec.lower().split(","):
        device, colon, name = pair.strip().partition(":")
        if not (device and colon and name and _is_name(name)):
            raise ValueError(f"{pair!r} in backend {spec!r} is not of the form device:backend")
        if device in _families:
            raise ValueError(
                f"{pair!r} in backend {spec!r} names no device: write cpu:{pair.strip()}, or the "
                "name alone for every device that it takes"
            )
        if device in devices:
            raise ValueError(f"backend {spec!r} names device {device!r} twice")
        if device not in find(name).devices:
            raise ValueError(
                f"backend {name!r} takes arrays on {', '.join(find(name).devices)}, not {device}"
            )
        devices[device] = name
    return devices


class BackendConfig:
    """The backend that serves each kind of memory, by a backend string.

    Args:
        backend: "tcp", or "cpu:tcp,cuda:nccl", as init_process_group takes it.

    Raises:
        ValueError: No backend has that name, or a pair is malformed.

    Examples:
        >>> dist.BackendConfig("cpu:gloo").get_device_backend_map()
        {'cpu': 'gloo'}
    """

    __module__ = "cydist"

    def __init__(self, backend: str) -> None:
        self.device_backend_map = {
            device: Backend(name) for device, name in parse(str(backend)).items()
        }

    def __repr__(self) -> str:
        return ",".join(f"{device}:{name}" for device, name in self.device_backend_map.items())

    def get_device_backend_map(self) -> dict[str, Backend]:
        """Return the backend of each kind of memory.

        Returns:
            Names by "cpu" and "cuda".
        """
        return self.device_backend_map


def canonical(spec: str) -> str:
    """Return a backend string in its shortest form: lower case, without spaces, and without devices
    if one backend serves all that it takes. Raises ValueError as `parse`."""
    devices = parse(spec)
    name = next(iter(devices.values()))
    if devices == dict.fromkeys(find(name).devices, name):
        return name
    return ",".join(f"{device}:{name}" for device, name in devices.items())


def _check_one_host(name: str, options: BackendOptions) -> None:
    """Raise UnsupportedError if the group's ranks are on several hosts."""
    from cydist.net.interfaces import boot_id

    hosts = [f"host/{rank}" for rank in range(options.group_size)]
    options.store.set(hosts[options.group_rank], boot_id())
    found = options.store.multi_get(hosts)
    away = [rank for rank, host in enumerate(found) if host != found[options.group_rank]]
    if away:
        ranks = ", ".join(str(options.global_ranks_in_group[rank]) for rank in away)
        raise UnsupportedError(
            f"{config.ENCRYPT.names[0]}=1: backend {name!r} does not encrypt what rank "
            f"{options.global_ranks_in_group[options.group_rank]} sends to other hosts, where "
            f"ranks {ranks} are: use backend 'tcp', or unset the variable where "
            "the network is trusted",
            group=options.group_id,
        )


def create(name: str, options: BackendOptions, pg_options: object) -> ProcessGroup:
    """Make a group of the backend called `name`."""
    from datetime import timedelta

    from cydist.groups.process_group import ProcessGroup

    plugin = find(name)
    if config.ENCRYPT.is_on() and not plugin.encrypts:
        _check_one_host(name, options)
    if plugin.extended_api:
        made = plugin.create(options, pg_options)
    else:
        made = plugin.create(
            options.store,
            options.group_rank,
            options.group_size,
            timedelta(seconds=options.timeout),
        )
    if not isinstance(made, ProcessGroup):
        raise UnsupportedError(
            f"backend {name!r} made a {type(made).__name__}, which is no cydist.ProcessGroup"
        )
    made.backend = name
    made.devices = plugin.devices
    made.group_name = GroupName(options.group_id)
    made.timeout = options.timeout
    made.ranks = tuple(options.global_ranks_in_group)
    return made
