"""DeviceMesh: the ranks of the world as an array of any dimensions, with a group along each."""

from __future__ import annotations

import operator
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from cydist.api.objects import all_gather_object
from cydist.api.process_groups import (
    AnyGroup,
    NonMember,
    current_world,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    init_process_group,
    is_initialized,
    usable_group,
)
from cydist.api.subgroups import new_subgroups_by_enumeration
from cydist.errors import MismatchError, UnsupportedError
from cydist.groups import registry
from cydist.groups.process_group import ProcessGroup

Ranks = npt.NDArray[np.int64]
Dimension = int | str
Override = str | tuple[str, Any]  # a backend, or one and its options

_thread = threading.local()


def _meshes_in_use() -> list[DeviceMesh]:
    """Return the meshes of this thread's `with` statements."""
    if not hasattr(_thread, "meshes"):
        _thread.meshes = []
    found: list[DeviceMesh] = _thread.meshes
    return found


class DeviceMesh:
    """The ranks as an array, one dimension for each kind of parallelism, with groups along them.

    Every rank of the world makes the same mesh. If there is no default group, this makes it. A mesh
    of all ranks in one dimension uses the default group.

    Args:
        device_type: "cpu" or "cuda": the memory of the arrays in calls on its groups.
        mesh: The global ranks, in an array of one dimension or more, each once.
        mesh_dim_names: A name for each dimension.
        backend_override: For a dimension, by number or name: the backend of its groups, or a pair
            of the backend and its options.

    Attributes:
        device_type: As given.
        mesh: The ranks, an array of int64.
        mesh_dim_names: As given; None without names.

    Raises:
        ValueError: The ranks, names or backends are wrong. No group but the default one was made,
            and you can call it again.
        TypeError: The names are of another type.
        UnsupportedError: The default group does not serve such arrays, or `device_type` has a
            number.
        MismatchError: The ranks make different meshes. The groups that there were stay usable.

    Examples:
        >>> mesh = dist.DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("replicas", "shards"))
        >>> mesh["replicas"].size(), mesh.get_coordinate() == (rank, 0)
        (2, True)
        >>> x = np.ones(1)
        >>> dist.all_reduce(x, group=mesh.get_group("replicas"))
        >>> x
        array([2.])
    """

    __module__ = "cydist"

    def __init__(
        self,
        device_type: str,
        mesh: npt.ArrayLike,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        backend_override: Mapping[Dimension, Override] | None = None,
    ) -> None:
        if not is_initialized():
            init_process_group()
        ranks = _ranks_of(mesh)
        names = _checked_names(mesh_dim_names, ranks.ndim)
        chosen = _overrides(backend_override or {}, names, ranks.ndim)
        kind = str(device_type).partition(":")[0]
        if kind != device_type:
            raise UnsupportedError(
                f"DeviceMesh: device_type is the kind of memory without a number: {kind!r}, not "
                f"{device_type!r}. Calls use the device of their arrays"
            )
        _default_group().for_device(device_type)
        _check_alike(device_type, ranks, names, chosen)
        self._set(device_type, ranks, names, [], [(dim,) for dim in range(ranks.ndim)])
        for dim in range(ranks.ndim):
            self._groups.append(_make_groups(ranks, dim, names, *chosen.get(dim, (None, None))))

    def _set(
        self,
        device_type: str,
        ranks: Ranks,
        names: tuple[str, ...] | None,
        groups: list[ProcessGroup | NonMember],
        dims: list[tuple[int, ...]],
        root: DeviceMesh | None = None,
    ) -> None:
        self.device_type = device_type
        self.mesh = ranks
        self.mesh_dim_names = names
        self._groups = groups  # this rank's, by dimension
        self._dims = dims  # for each dimension, those of the root that it is made of
        self._root = root
        self._flattened: dict[str, DeviceMesh] = {}  # of a root, by name

    @classmethod
    def _part(
        cls,
        root: DeviceMesh,
        ranks: Ranks,
        names: tuple[str, ...],
        groups: list[ProcessGroup | NonMember],
        dims: list[tuple[int, ...]],
    ) -> DeviceMesh:
        """Return a mesh over groups that there are."""
        made = cls.__new__(cls)
        made._set(root.device_type, ranks, names, groups, dims, root)
        return made

    @classmethod
    def from_group(
        cls,
        group: ProcessGroup | Sequence[ProcessGroup],
        device_type: str,
        mesh: npt.ArrayLike | None = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        """Return a mesh over groups that you have made.

        Args:
            group: One group, for a mesh of one dimension, or a group for each dimension.
            device_type: "cpu" or "cuda".
            mesh: The global ranks; None, for one group: its ranks.
            mesh_dim_names: A name for each dimension.

        Returns:
            The mesh.

        Raises:
            ValueError: A group does not have the ranks that the mesh has there, this rank is not
                in it, or names or dimensions are wrong.

        Examples:
            >>> pair = dist.new_group([0, 1])
            >>> mesh = dist.DeviceMesh.from_group(pair, "cpu")
            >>> mesh.mesh
            array([0, 1])
        """
        if isinstance(group, NonMember):
            raise ValueError("from_group: this rank is not in the group: let its members call it")
        groups = [group] if isinstance(group, ProcessGroup) else list(group)
        if mesh is None:
            if len(groups) != 1:
                raise ValueError("from_group: several groups need the argument mesh")
            mesh = groups[0].ranks
        ranks = _ranks_of(mesh)
        if ranks.ndim != len(groups):
            raise ValueError(
                f"from_group: a mesh of {ranks.ndim} dimensions needs as many groups, not "
                f"{len(groups)}"
            )
        made = cls.__new__(cls)
        names = _checked_names(mesh_dim_names, ranks.ndim)
        made._set(device_type, ranks, names, list(groups), [(dim,) for dim in range(ranks.ndim)])
        for dim, each in enumerate(groups):
            each.for_device(device_type)
            expected = made._ranks_along(dim)
            if expected is not None and list(each.ranks) != expected:
                raise ValueError(
                    f"from_group: {each.title} has ranks {list(each.ranks)}, and the "
                    f"mesh has {expected} along dimension {dim}"
                )
        return made

    # Its form.

    @property
    def ndim(self) -> int:
        """Return the number of dimensions.

        Returns:
            At least 1.
        """
        return self.mesh.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the number of ranks along each dimension.

        Returns:
            One number for each dimension.
        """
        return self.mesh.shape

    def size(self, mesh_dim: Dimension | None = None) -> int:
        """Return the number of ranks along a dimension.

        Args:
            mesh_dim: Its number or name; None: all ranks of the mesh.

        Returns:
            At least 1.

        Raises:
            KeyError: There is no such name.
            IndexError: There is no such dimension.

        Examples:
            >>> dist.DeviceMesh("cpu", [[0, 1]]).size(1)
            2
        """
        return self.mesh.size if mesh_dim is None else self.shape[self._dim(mesh_dim)]

    def get_rank(self) -> int:
        """Return this rank's number in the world.

        Returns:
            A global rank.
        """
        return get_rank()

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Return this rank's place in the mesh.

        Returns:
            Its index along each dimension; None if it is not in the mesh.
        """
        found = np.argwhere(self.mesh == get_rank())
        return tuple(map(int, found[0])) if len(found) else None

    def get_local_rank(self, mesh_dim: Dimension | None = None) -> int:
        """Return this rank's number along a dimension, which is its rank in that group.

        Args:
            mesh_dim: Its number or name; None, in a mesh of one dimension: that one.

        Returns:
            0 to size - 1.

        Raises:
            RuntimeError: The mesh has several dimensions and none is given, or this rank is not in
                the mesh.
            KeyError: There is no such name.
            IndexError: There is no such dimension.

        Examples:
            >>> assert dist.DeviceMesh("cpu", [0, 1]).get_local_rank() == rank
        """
        dim = self._only_dim("get_local_rank") if mesh_dim is None else self._dim(mesh_dim)
        place = self.get_coordinate()
        if place is None:
            raise RuntimeError(f"get_local_rank: rank {get_rank()} is not in {self}")
        return place[dim]

    def get_group(self, mesh_dim: Dimension | None = None) -> AnyGroup:
        """Return this rank's group along a dimension.

        Args:
            mesh_dim: Its number or name; None, in a mesh of one dimension: that one.

        Returns:
            The group; GroupMember.NON_GROUP_MEMBER if this rank is not in the mesh.

        Raises:
            RuntimeError: The mesh has several dimensions and none is given.
            KeyError: There is no such name.
            IndexError: There is no such dimension.

        Examples:
            >>> mesh = dist.DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("a", "b"))
            >>> mesh.get_group("b").ranks
            (0, 1)
        """
        dim = self._only_dim("get_group") if mesh_dim is None else self._dim(mesh_dim)
        return self._groups[dim]

    def get_all_groups(self) -> list[AnyGroup]:
        """Return this rank's group along each dimension.

        Returns:
            A new list.
        """
        return list(self._groups)

    # Parts.

    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        """Return this rank's part along some dimensions, over the same groups.

        Args:
            mesh_dim_names: Their names, in the order of the mesh, or the name of a flattened part.

        Returns:
            A mesh of these dimensions.

        Raises:
            RuntimeError: The mesh has no names.
            KeyError: There is no such name, or their order is another.
            TypeError: These are no names.

        Examples:
            >>> mesh = dist.DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("a", "b"))
            >>> mesh["b"].mesh
            array([0, 1])
        """
        if self.mesh_dim_names is None:
            raise RuntimeError(f"{self} has no mesh_dim_names to slice it by")
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else mesh_dim_names
        if not (isinstance(names, Sequence) and all(isinstance(name, str) for name in names)):
            raise TypeError(
                f"a mesh is sliced by names of {self.mesh_dim_names}, not by {mesh_dim_names!r}"
            )
        names = tuple(names)
        root = self._root or self
        if len(names) == 1 and names[0] in root._flattened:
            return root._flattened[names[0]]
        dims = [self._dim(name) for name in names]
        if not dims or dims != sorted(set(dims)):
            raise KeyError(
                f"the names {names} must be in the order of the mesh's, {self.mesh_dim_names}, "
                "each at most once"
            )
        if names == self.mesh_dim_names:
            return self
        # This rank's index in all other dimensions; of a rank outside: the first.
        place = self.get_coordinate() or (0,) * self.ndim
        chosen = tuple(slice(None) if dim in dims else place[dim] for dim in range(self.ndim))
        groups = [self._groups[dim] for dim in dims]
        return DeviceMesh._part(
            root, self.mesh[chosen], names, groups, [self._dims[dim] for dim in dims]
        )

    def _flatten(self, mesh_dim_name: str | None = None) -> DeviceMesh:
        """Return the mesh in one dimension, over a new group of all its ranks. Every rank of the
        world calls it on its own part. From then on the root has the part under this name.

        Args:
            mesh_dim_name: The new dimension's name; None: those of the mesh, with underscores.

        Raises ValueError if the root has a dimension, or another flattened part, of that name.
        """
        if self.ndim == 1 and mesh_dim_name in (None, *(self.mesh_dim_names or ())):
            return self
        root = self._root or self
        name = mesh_dim_name or "_".join(self.mesh_dim_names or ("flat",))
        dims = tuple(dim for part in self._dims for dim in part)
        if name in (root.mesh_dim_names or ()):
            raise ValueError(f"_flatten: the mesh has a dimension {name!r} already")
        if (known := root._flattened.get(name)) is not None:
            if known._dims != [dims]:
                raise ValueError(f"_flatten: the mesh has another part {name!r}: give a new name")
            return known
        others = [dim for dim in range(root.ndim) if dim not in dims]
        parts = np.transpose(root.mesh, [*others, *dims]).reshape(-1, self.mesh.size)
        mine, _ = new_subgroups_by_enumeration(parts.tolist(), group_desc=f"mesh {name}")
        flat = DeviceMesh._part(root, self.mesh.reshape(-1), (name,), [mine], [dims])
        root._flattened[name] = flat
        return flat

    # The mesh in use.

    @staticmethod
    def get_current() -> DeviceMesh:
        """Return the mesh of the innermost `with mesh:` of this thread.

        Returns:
            The mesh.

        Raises:
            RuntimeError: There is none.

        Examples:
            >>> with dist.DeviceMesh("cpu", [0, 1]) as mesh:
            ...     assert dist.DeviceMesh.get_current() is mesh
        """
        meshes = _meshes_in_use()
        if not meshes:
            raise RuntimeError("DeviceMesh.get_current: this thread is in no `with mesh:`")
        return meshes[-1]

    def __enter__(self) -> Self:
        _meshes_in_use().append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _meshes_in_use().pop()

    # Helpers.

    def _dim(self, mesh_dim: Dimension) -> int:
        if isinstance(mesh_dim, str):
            names = self.mesh_dim_names or ()
            if mesh_dim not in names:
                raise KeyError(f"the mesh has no dimension {mesh_dim!r}, its names are {names}")
            return names.index(mesh_dim)
        if not -self.ndim <= mesh_dim < self.ndim:
            raise IndexError(f"the mesh has {self.ndim} dimensions, not one of number {mesh_dim}")
        return mesh_dim % self.ndim

    def _only_dim(self, call: str) -> int:
        if self.ndim > 1:
            raise RuntimeError(f"{call}: {self} has {self.ndim} dimensions: name one")
        return 0

    def _ranks_along(self, dim: int) -> list[int] | None:
        """Return the ranks of this rank's row; None if it is not in the mesh."""
        place = self.get_coordinate()
        if place is None:
            return None
        row = np.moveaxis(self.mesh, dim, -1)[place[:dim] + place[dim + 1 :]]
        return list(map(int, row))

    def __repr__(self) -> str:
        names = self.mesh_dim_names or tuple(map(str, range(self.ndim)))
        form = ", ".join(f"{name}={size}" for name, size in zip(names, self.shape, strict=True))
        return f"DeviceMesh({self.device_type!r}, {self.mesh.tolist()}, {form})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceMesh) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        names, ranks = self.mesh_dim_names, tuple(self.mesh.ravel().tolist())
        return self.device_type, self.shape, ranks, names


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: Mapping[Dimension, Override] | None = None,
) -> DeviceMesh:
    """Make a mesh of all ranks, in their order.

    Every rank of the world calls it. If there is no default group, it makes that one.

    Args:
        device_type: "cpu" or "cuda": the memory of the arrays in calls on its groups.
        mesh_shape: The number of ranks along each dimension. Their product is the number of ranks.
        mesh_dim_names: A name for each dimension.
        backend_override: For a dimension, by number or name: the backend of its groups, or a pair
            of the backend and its options.

    Returns:
        The mesh. Neighbours along the last dimension have neighbouring ranks.

    Raises:
        ValueError: The shape does not fit the number of ranks, or names or backends are wrong. No
            group but the default one was made, and you can call it again.
        TypeError: The shape or the names are of another type.
        UnsupportedError: The default group does not serve such arrays, or `device_type` has a
            number.
        MismatchError: The ranks make different meshes. The groups that there were stay usable.

    Examples:
        >>> mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicas", "shards"))
        >>> mesh["shards"].get_group().ranks
        (0, 1)
    """
    if not is_initialized():
        init_process_group()
    size = get_world_size()
    try:
        shape = tuple(operator.index(each) for each in mesh_shape)
    except TypeError:
        raise TypeError(
            "init_device_mesh: mesh_shape must be the number of ranks along each dimension, such "
            f"as ({size},), not {mesh_shape!r}"
        ) from None
    if not shape or any(each < 1 for each in shape) or np.prod(shape) != size:
        raise ValueError(
            f"init_device_mesh: mesh_shape {shape} is for {np.prod(shape)} ranks, and there are "
            f"{size}"
        )
    ranks = np.arange(size).reshape(shape)
    return DeviceMesh(
        device_type, ranks, mesh_dim_names=mesh_dim_names, backend_override=backend_override
    )


def _default_group() -> ProcessGroup:
    found = usable_group(None, "DeviceMesh")
    assert found is not None
    return found


def _ranks_of(mesh: npt.ArrayLike) -> Ranks:
    """Return the ranks as an array. Raises ValueError if they are none."""
    try:
        found = np.asarray(mesh)
    except ValueError:  # rows of different lengths
        found = np.empty(0)
    if found.ndim == 0 or found.size == 0 or not np.issubdtype(found.dtype, np.integer):
        raise ValueError(
            "DeviceMesh: mesh must be an array of global ranks, with rows of one length, not "
            f"{mesh!r}"
        )
    ranks = found.astype(np.int64)
    size = current_world().size
    if ranks.min() < 0 or ranks.max() >= size or len(np.unique(ranks)) != ranks.size:
        raise ValueError(
            f"DeviceMesh: ranks {ranks.tolist()} must be different numbers from 0 to {size - 1}"
        )
    return ranks


def _checked_names(names: Sequence[str] | None, ndim: int) -> tuple[str, ...] | None:
    if names is None:
        return None
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise TypeError(
            f"DeviceMesh: mesh_dim_names must be a sequence of names, such as ('a', 'b'), not "
            f"{names!r}"
        )
    found = tuple(names)
    if len(set(found)) != ndim or len(found) != ndim:
        raise ValueError(
            f"DeviceMesh: a mesh of {ndim} dimensions needs as many different mesh_dim_names, not "
            f"{found}"
        )
    return found


def _overrides(
    given: Mapping[Dimension, Override], names: tuple[str, ...] | None, ndim: int
) -> dict[int, tuple[str, Any]]:
    """Return backend and options by dimension. Raises ValueError for a dimension that is not."""
    chosen: dict[int, tuple[str, Any]] = {}
    for key, value in given.items():
        known = list(names or ()) if isinstance(key, str) else list(range(ndim))
        if key not in known:
            raise ValueError(
                f"DeviceMesh: backend_override names dimension {key!r}, not in {known}"
            )
        dim = known.index(key)  # type: ignore[arg-type]
        if dim in chosen:
            raise ValueError(f"DeviceMesh: backend_override names dimension {dim} twice")
        if isinstance(value, str):
            value = value, None
        if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str)):
            raise ValueError(
                f"DeviceMesh: backend_override has {value!r} for dimension {key!r}: give the name "
                "of a backend, or a pair of a name and options"
            )
        chosen[dim] = registry.canonical(value[0]), value[1]
    return chosen


def _check_alike(
    device_type: str, ranks: Ranks, names: tuple[str, ...] | None,
    chosen: dict[int, tuple[str, Any]],
) -> None:  # fmt: skip
    """Raise MismatchError if the ranks make different meshes, since their groups would not meet."""
    backends = {dim: backend for dim, (backend, _) in chosen.items()}
    ours = repr((device_type, ranks.tolist(), names, backends))
    all_texts: list[Any] = [None] * get_world_size()
    all_gather_object(all_texts, ours)
    for rank, theirs in enumerate(all_texts):
        if theirs != ours:
            raise MismatchError(
                f"DeviceMesh: the ranks make different meshes: {ours} on rank {get_rank()}, "
                f"{theirs} on rank {rank}. Pass the same arguments on all ranks",
                ranks=(rank,),
            )


def _make_groups(
    ranks: Ranks, dim: int, names: tuple[str, ...] | None, backend: str | None, options: Any
) -> ProcessGroup | NonMember:
    """Make the groups along a dimension; return this rank's."""
    rows = np.moveaxis(ranks, dim, -1).reshape(-1, ranks.shape[dim]).tolist()
    default = _default_group()
    if backend is None and rows == [get_process_group_ranks(None)]:
        return default
    name = names[dim] if names else str(dim)
    mine, _ = new_subgroups_by_enumeration(
        rows, None, backend, options, group_desc=f"mesh dimension {name}"
    )
    return mine
