"""DeviceMesh: what torch's has, over cydist's own groups."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist.testing import run_threads

NAMES = ("dp", "cp", "tp")


def sum_of_ranks(group: Any) -> int:
    x = np.array([dist.get_rank()])
    dist.all_reduce(x, group=group)
    return int(x[0])


@pytest.mark.parametrize(
    "program",
    [
        "from cydist.device_mesh import DeviceMesh, init_device_mesh",
        "DeviceMesh, init_device_mesh = "
        "dist.device_mesh.DeviceMesh, dist.device_mesh.init_device_mesh",
    ],
    ids=["import", "attribute"],
)
def test_meshes_are_where_torch_has_them(program: str) -> None:
    """In a process that has not used them."""
    check = "assert (DeviceMesh, init_device_mesh) == (dist.DeviceMesh, dist.init_device_mesh)"
    program = f"import cydist as dist\n{program}\n{check}"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=50)


def described(mesh: Any, group_ranks: Any) -> list[object]:
    """All that a mesh of either library says."""
    names = mesh.mesh_dim_names
    found: list[object] = [
        mesh.ndim, tuple(mesh.shape), mesh.size(), names, mesh.mesh.tolist(),
        mesh.get_coordinate() and list(mesh.get_coordinate()),
    ]  # fmt: skip
    for dim in range(mesh.ndim):
        found += [mesh.size(dim), mesh.get_local_rank(dim), group_ranks(mesh.get_group(dim))]
        found.append(group_ranks(mesh.get_group(names[dim])))
    return found


def parts_of(mesh: Any, group_ranks: Any) -> list[object]:
    """What the slices and the flattened parts of a mesh of three dimensions say."""
    slices = [mesh[name] for name in NAMES] + [mesh["dp", "cp"], mesh["dp", "tp"], mesh["cp", "tp"]]
    flat = mesh["dp", "cp"]._flatten("dp_cp")
    whole = mesh._flatten()
    return [described(each, group_ranks) for each in (mesh, *slices, flat, whole, mesh["dp_cp"])]


TORCHS = """
import sys
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
sys.path[:0] = sys.argv[1:]
import test_device_mesh
dist.init_process_group("fake", rank={rank}, world_size=8, store=store)
mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
print(test_device_mesh.parts_of(mesh, dist.get_process_group_ranks))
"""


def test_a_mesh_says_what_torchs_says() -> None:
    """Of every rank of eight: its form, slices and flattened parts, and their groups' ranks."""
    pytest.importorskip("torch")

    def body(rank: int) -> str:
        mesh = dist.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES)
        return str(parts_of(mesh, dist.get_process_group_ranks))

    ours = run_threads(body, 8)
    store = "from torch.testing._internal.distributed.fake_pg import FakeStore; store = FakeStore()"
    for rank in (0, 5):
        program = store + TORCHS.format(rank=rank)
        done = subprocess.run(
            [sys.executable, "-c", program, *sys.path, __file__.rpartition("/")[0]],
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == ours[rank]


def test_groups_reduce_along_their_dimension() -> None:
    """Of a mesh of two rows and three columns, also flattened."""

    def body(rank: int) -> tuple[int, int, int]:
        mesh = dist.init_device_mesh("cpu", (2, 3), mesh_dim_names=("rows", "columns"))
        flat = mesh["rows", "columns"]._flatten("all")
        assert mesh["all"] is flat
        groups = mesh.get_group("rows"), mesh.get_group("columns"), flat.get_group()
        return tuple(map(sum_of_ranks, groups))  # type: ignore[return-value]

    expected = [(r % 3 * 2 + 3, 3 if r < 3 else 12, 15) for r in range(6)]
    assert run_threads(body, 6) == expected


def test_flattened_parts_have_their_own_names() -> None:
    """A name is one part's; a flattened part may get a second name."""

    def body(rank: int) -> None:
        mesh = dist.init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
        flat = mesh["a", "b"]._flatten("x")
        assert mesh["a", "b"]._flatten("x") is flat
        with pytest.raises(ValueError, match="another part 'x'"):
            mesh["b", "c"]._flatten("x")
        again = flat._flatten("y")
        assert again == dist.DeviceMesh("cpu", range(4), mesh_dim_names=("y",))
        assert sum_of_ranks(again.get_group()) == 6

    run_threads(body, 4)


def test_one_dimension_of_all_ranks_is_the_default_group() -> None:
    """No group is made."""

    def body(rank: int) -> None:
        mesh = dist.init_device_mesh("cpu", (2,))
        assert mesh.get_group() is dist.group.WORLD
        assert dist.get_pg_count() == 1

    run_threads(body, 2)


def test_a_rank_outside_a_mesh_makes_it_with_the_others() -> None:
    """It has no place there, and no group."""

    def body(rank: int) -> int:
        mesh = dist.DeviceMesh("cpu", [[2, 0]], mesh_dim_names=("a", "b"))
        if rank == 1:
            assert mesh.get_coordinate() is None
            assert not mesh.get_group("b")
            with pytest.raises(RuntimeError, match="rank 1 is not in"):
                mesh.get_local_rank("b")
            return -1
        assert mesh["b"].get_local_rank() == [2, 0].index(rank)
        return sum_of_ranks(mesh.get_group("b"))

    assert run_threads(body, 3) == [2, -1, 2]


def test_it_is_made_of_groups_that_there_are() -> None:
    """One for each dimension; others are refused."""

    def body(rank: int) -> None:
        alone, _ = dist.new_subgroups(1)
        pair = dist.new_group()
        mesh = dist.DeviceMesh.from_group([alone, pair], "cpu", [[0, 1]], mesh_dim_names=("a", "b"))
        assert mesh.get_all_groups() == [alone, pair]
        assert mesh["b"].get_group() is pair
        with pytest.raises(ValueError, match=r"has ranks .* along dimension 1"):
            dist.DeviceMesh.from_group([alone, alone], "cpu", [[0, 1]])
        with pytest.raises(ValueError, match="need the argument mesh"):
            dist.DeviceMesh.from_group([alone, pair], "cpu")
        with pytest.raises(ValueError, match="as many groups"):
            dist.DeviceMesh.from_group(pair, "cpu", [[0, 1]])

    run_threads(body, 2)


def test_a_dimension_has_the_backend_that_it_is_given() -> None:
    """By number or name, with options or without."""

    def body(rank: int) -> None:
        mesh = dist.init_device_mesh(
            "cpu",
            (2, 1),
            mesh_dim_names=("a", "b"),
            backend_override={"a": "tcp", 1: ("tcp", None)},
        )
        assert [dist.get_backend(group) for group in mesh.get_all_groups()] == ["tcp", "tcp"]
        before = dist.get_pg_count()
        unknown = {"b": "no such backend"}
        for wrong in (
            {"c": "tcp"}, {2: "tcp"}, {"a": "tcp", 0: "tcp"}, {"a": ("tcp",)}, {"a": None}, unknown
        ):  # fmt: skip
            words = "no backend is called" if wrong is unknown else "backend_override"
            with pytest.raises(ValueError, match=words):
                dist.init_device_mesh(
                    "cpu", (2, 1), mesh_dim_names=("a", "b"), backend_override=wrong
                )
        assert dist.get_pg_count() == before

    run_threads(body, 2)


def test_ranks_that_make_different_meshes_are_told() -> None:
    """On every rank, before any group is made, and the default group stays usable."""

    def body(rank: int) -> None:
        with pytest.raises(dist.MismatchError, match="different meshes"):
            dist.init_device_mesh("cpu", (1, 2) if rank else (2, 1))
        assert dist.get_pg_count() == 1
        dist.barrier()

    run_threads(body, 2)


@pytest.mark.parametrize(
    "mesh", [[], 0, [0, 0], [0, 2], [-1, 0], [0.0, 1.0], [[0], [0, 1]]],
    ids=["empty", "a number", "twice", "unknown", "negative", "floats", "ragged"],
)  # fmt: skip
def test_wrong_ranks_are_refused(mesh: Any) -> None:
    """Before any traffic."""

    def body(rank: int) -> None:
        with pytest.raises(ValueError, match="DeviceMesh: "):
            dist.DeviceMesh("cpu", mesh)

    run_threads(body, 2)


@pytest.mark.parametrize("shape", [(), (3,), (2, 2), (-1, -2), (0,)])
def test_a_shape_of_other_ranks_is_refused(shape: tuple[int, ...]) -> None:
    """The product is the number of ranks."""

    def body(rank: int) -> None:
        with pytest.raises(ValueError, match="there are 2"):
            dist.init_device_mesh("cpu", shape)

    run_threads(body, 2)


@pytest.mark.parametrize("names", [("a",), ("a", "a"), ("a", "b", "c")])
def test_wrong_names_are_refused(names: tuple[str, ...]) -> None:
    """A name for each dimension, and no two alike."""

    def body(rank: int) -> None:
        with pytest.raises(ValueError, match="as many different mesh_dim_names"):
            dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=names)

    run_threads(body, 2)


@pytest.mark.parametrize("shape", [2, None, "2", (2.0,), ("2",)])
def test_a_shape_that_is_none_is_refused(shape: Any) -> None:
    """With what to pass in its place."""

    def body(rank: int) -> None:
        with pytest.raises(TypeError, match=r"mesh_shape must be .* such as \(2,\), not "):
            dist.init_device_mesh("cpu", shape)

    run_threads(body, 2)


def test_a_text_in_place_of_names_is_refused() -> None:
    """It is not taken for its letters."""

    def body(rank: int) -> None:
        for names in ("dp", 5):
            with pytest.raises(TypeError, match=r"mesh_dim_names must be a sequence of names"):
                dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=names)  # type: ignore[arg-type]

    run_threads(body, 2)


@pytest.mark.parametrize("device_type", ["cpu:0", "cuda:1"])
def test_a_device_with_a_number_is_refused(device_type: str) -> None:
    """Each rank has a device of its own."""

    def body(rank: int) -> None:
        kind = device_type.partition(":")[0]
        with pytest.raises(
            dist.UnsupportedError, match=f"without a number: '{kind}', not '{device_type}'"
        ):
            dist.init_device_mesh(device_type, (2,))

    run_threads(body, 2)


@pytest.mark.parametrize("names", [0, None, (0, "b")])
def test_a_slice_by_something_else_than_names_is_refused(names: Any) -> None:
    """With the names that there are."""

    def body(rank: int) -> None:
        mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
        with pytest.raises(TypeError, match=r"by names of \('a', 'b'\), not "):
            mesh[names]

    run_threads(body, 2)


def test_wrong_slices_are_refused() -> None:
    """Unknown names, another order, a mesh without names; several dimensions need a name."""

    def body(rank: int) -> None:
        mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
        for names in ("c", ("b", "a"), ("a", "a"), ()):
            with pytest.raises(KeyError):
                mesh[names]
        with pytest.raises(RuntimeError, match="no mesh_dim_names"):
            dist.DeviceMesh("cpu", [0, 1])["a"]
        for call in (mesh.get_group, mesh.get_local_rank):
            with pytest.raises(RuntimeError, match="name one"):
                call()
            with pytest.raises(KeyError, match="no dimension 'c'"):
                call("c")
            with pytest.raises(IndexError, match="not one of number 2"):
                call(2)
        with pytest.raises(ValueError, match="has a dimension 'a' already"):
            mesh["a", "b"]._flatten("a")
        with pytest.raises(ValueError, match="not in the group"):
            dist.DeviceMesh.from_group(dist.GroupMember.NON_GROUP_MEMBER, "cpu")

    run_threads(body, 2)


def test_memory_that_the_group_does_not_serve_is_refused() -> None:
    """By the default group, before any traffic."""

    def body(rank: int) -> None:
        with pytest.raises(dist.UnsupportedError, match="takes arrays on cpu"):
            dist.DeviceMesh("xpu", [0, 1])

    run_threads(body, 2)


def test_it_makes_the_default_group() -> None:
    """If there is none yet, as torch's does."""
    program = (
        "import cydist as dist\n"
        "assert dist.init_device_mesh('cpu', (1, 2)).get_group(1).size() == 2\n"
        "dist.destroy_process_group()\n"
    )
    command = [sys.executable, "-m", "cydist.run", "--nproc-per-node", "2", "--no-python"]
    done = subprocess.run(
        [*command, sys.executable, "-c", program], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_mesh_in_use_is_its_threads() -> None:
    """`with mesh:` nests, and ranks that are threads do not see each other's."""

    def body(rank: int) -> None:
        with pytest.raises(RuntimeError, match="no `with mesh:`"):
            dist.DeviceMesh.get_current()
        outer, inner = dist.DeviceMesh("cpu", [0, 1]), dist.DeviceMesh("cpu", [[0, 1]])
        with outer:
            with inner:
                assert dist.DeviceMesh.get_current() is inner
            assert dist.DeviceMesh.get_current() is outer

    run_threads(body, 2)


def test_equal_meshes_are_equal() -> None:
    """By memory, ranks, form and names, whatever their groups."""

    def body(rank: int) -> None:
        mesh = dist.DeviceMesh("cpu", [0, 1])
        assert mesh == dist.DeviceMesh("cpu", np.arange(2))
        assert hash(mesh) == hash(dist.DeviceMesh("cpu", [0, 1]))
        assert mesh != dist.DeviceMesh("cpu", [1, 0])
        assert mesh != dist.DeviceMesh("cpu", [[0, 1]])
        assert mesh != dist.DeviceMesh("cpu", [0, 1], mesh_dim_names=("a",))
        assert repr(mesh) == "DeviceMesh('cpu', [0, 1], 0=2)"

    run_threads(body, 2)


@pytest.mark.parametrize(
    ("variable", "fallback", "expected"), [("3", 0, 3), ("3", None, 3), (None, 7, 7)]
)
def test_the_rank_on_the_host(
    variable: str | None, fallback: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is the launcher's, else the one that the program gives."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if variable:
        monkeypatch.setenv("LOCAL_RANK", variable)
    assert dist.get_node_local_rank(fallback) == expected


def test_without_a_rank_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the variable."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(RuntimeError, match="LOCAL_RANK"):
        dist.get_node_local_rank()


def test_torchruns_variable_says_who_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's function of that name."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not dist.is_torchelastic_launched()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert dist.is_torchelastic_launched()
