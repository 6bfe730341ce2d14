"""`cydist.deprecated`: what torch.distributed's first documents define, and their examples."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transport_ranks import free_port

import cydist
import cydist.deprecated as dist
from cydist.testing import run_threads

# What the first `torch.distributed.deprecated` page and `torch/distributed/__init__.py` define.
NAMES = [
    *("dist_backend", "is_available", "destroy_process_group", "is_initialized"),
    *("init_process_group", "init_master_worker", "reduce_op", "group", "_DistributedRequest"),
    *("get_rank", "get_world_size", "isend", "irecv", "send", "recv", "broadcast_multigpu"),
    *("broadcast", "all_reduce_multigpu", "all_reduce", "reduce_multigpu", "reduce"),
    *("all_gather_multigpu", "all_gather", "gather", "scatter", "barrier", "new_group"),
    *("_clear_group_cache", "_register_stream", "_initialized", "_backend", "_INITIALIZED_PG"),
    *("_INITIALIZED_MW", "launch"),
]
# The parameters that programs may give by position, and the default of the last.
SIGNATURES = {
    "init_process_group": ["backend", "init_method", "kwargs"],
    "init_master_worker": ["backend", "init_method", "kwargs"],
    "destroy_process_group": [],
    "is_initialized": [],
    "get_rank": [],
    "get_world_size": [],
    "isend": ["tensor", "dst"],
    "irecv": ["tensor", "src"],
    "send": ["tensor", "dst"],
    "recv": ["tensor", "src"],
    "broadcast": ["tensor", "src", "group"],
    "all_reduce": ["tensor", "op", "group"],
    "reduce": ["tensor", "dst", "op", "group"],
    "all_gather": ["tensor_list", "tensor", "group"],
    "gather": ["tensor", "kwargs"],
    "scatter": ["tensor", "kwargs"],
    "barrier": ["group"],
    "new_group": ["ranks"],
    "broadcast_multigpu": ["tensor_list", "src", "group"],
    "all_reduce_multigpu": ["tensor_list", "op", "group"],
    "reduce_multigpu": ["tensor_list", "dst", "op", "group"],
    "all_gather_multigpu": ["output_tensor_lists", "input_tensor_list", "group"],
    "_clear_group_cache": ["group"],
    "_register_stream": ["stream"],
}


@pytest.mark.parametrize("name", NAMES)
def test_documented_names(name: str) -> None:
    """Everything that the first documents define is there."""
    assert hasattr(dist, name)


@pytest.mark.parametrize("name", SIGNATURES)
def test_documented_parameters(name: str) -> None:
    """Parameters have the documented names and order; newer ones come after them."""
    found = list(inspect.signature(getattr(dist, name)).parameters)
    assert found[: len(SIGNATURES[name])] == SIGNATURES[name]


def test_an_unknown_name_says_where_to_look() -> None:
    """A name of today's API is not here; the error says where it is."""
    with pytest.raises(AttributeError, match="the module cydist has the rest"):
        dist.all_to_all_single  # noqa: B018


def test_backend_numbers() -> None:
    """dist_backend has the documented numbers."""
    each = dist.dist_backend
    assert (each.UNDEFINED, each.TCP, each.MPI, each.GLOO, each.NCCL) == (-1, 0, 1, 2, 3)


@pytest.fixture(params=["numpy", "torch"])
def array(request: pytest.FixtureRequest) -> Any:
    """Makes an array of a list."""
    if request.param == "numpy":
        return np.array
    return pytest.importorskip("torch").tensor


@pytest.mark.parametrize(("op", "expected"), [("SUM", 12), ("PRODUCT", 60), ("MAX", 5), ("MIN", 3)])
def test_reduce_op(array: Any, op: str, expected: int) -> None:
    """Reductions take the documented operations, in all_reduce and reduce."""

    def body(rank: int) -> None:
        x, y = array([3 + rank]), array([3 + rank])
        dist.all_reduce(x, getattr(dist.reduce_op, op))
        dist.reduce(y, 1, op=getattr(dist.reduce_op, op), group=dist.group.WORLD)
        assert x.tolist() == [expected]
        assert y.tolist() == ([expected] if rank == 1 else [3 + rank])

    run_threads(body, 3)


def test_collectives(array: Any) -> None:
    """broadcast, all_gather, barrier and groups of some ranks, with the documented arguments."""

    def body(rank: int) -> None:
        pair = dist.new_group([0, 2])
        x = array([rank])
        dist.broadcast(x, 1)
        assert x.tolist() == [1]
        parts = [array([0]) for _ in range(3)]
        dist.all_gather(parts, array([10 + rank]))
        assert [part.tolist() for part in parts] == [[10], [11], [12]]
        if rank != 1:
            x = array([rank])
            dist.all_reduce(x, group=pair)
            assert x.tolist() == [2]
        everyone = dist.new_group()
        dist.barrier()
        dist.barrier(everyone)
        assert (dist.get_rank(), dist.get_world_size()) == (rank, 3)

    run_threads(body, 3)


def test_messages(array: Any) -> None:
    """recv returns the sender; isend and irecv return requests."""

    def body(rank: int) -> None:
        if rank == 0:
            dist.send(array([7]), 1)
            dist.send(array([8]), dst=1)
            request = dist.isend(array([9]), 1)
        else:
            x = array([0])
            assert (dist.recv(x), x.tolist()) == (0, [7])
            assert (dist.recv(x, src=0), x.tolist()) == (0, [8])
            request = dist.irecv(x, 0)
        assert request.wait() is None
        assert request.is_completed()
        assert isinstance(request, dist._DistributedRequest)
        assert rank == 0 or x.tolist() == [9]

    run_threads(body, 2)


@pytest.mark.parametrize("root", [0, 1])
def test_the_root_is_by_default_the_caller(array: Any, root: int) -> None:
    """In gather and scatter the rank that gives a list need not say that it is the root."""

    def body(rank: int) -> None:
        x, lists = array([rank]), [array([20 + i]) for i in range(2)]
        if rank == root:
            assert dist.gather(x, gather_list=lists) is None
            assert [each.tolist() for each in lists] == [[0], [1]]
            assert dist.scatter(x, scatter_list=[array([30]), array([31])]) is None
        else:
            dist.gather(x, dst=root)
            dist.scatter(x, src=root, scatter_list=[])
        assert x.tolist() == [30 + rank]

    run_threads(body, 2)


@pytest.mark.parametrize(
    ("call", "keywords", "text"),
    [
        ("gather", {}, "gather_list is a required argument in gather destination"),
        ("scatter", {}, "scatter_list is a required argument in scatter source"),
        ("gather", {"dst": -1, "gather_list": [1]}, "non-empty gather_list can be given only to"),
        ("scatter", {"src": -1, "scatter_list": [1]}, "non-empty can be given only to scatter sou"),
        ("gather", {"async_op": True}, "got unexpected kwargs"),
        ("scatter", {"async_op": True}, "got unexpected kwargs"),
    ],
)
def test_wrong_lists(call: str, keywords: dict[str, Any], text: str) -> None:
    """RuntimeErrors with the documented texts, before any traffic; the group goes on."""

    def body(rank: int) -> None:
        given = {name: 1 - rank if value == -1 else value for name, value in keywords.items()}
        x = np.ones(1)
        with pytest.raises(RuntimeError, match=text):
            getattr(dist, call)(x, **given)
        dist.all_reduce(x)
        assert x == 2

    run_threads(body, 2)


@pytest.mark.parametrize(
    "name",
    [name for name, found in SIGNATURES.items() if found and not name.startswith(("init_", "_"))]
    + ["get_rank", "get_world_size"],
)
def test_calls_before_the_start(name: str) -> None:
    """Without a default group every documented call is an AssertionError, as documented."""
    required = [
        each for each in inspect.signature(getattr(dist, name)).parameters.values()
        if each.default is each.empty and each.kind != each.VAR_KEYWORD
    ]  # fmt: skip
    with pytest.raises(AssertionError):
        getattr(dist, name)(*[0] * len(required))


def test_streams() -> None:
    """_register_stream needs a group and a stream, and has nothing to do."""

    class Stream:
        cuda_stream = 7

    with pytest.raises(RuntimeError, match="needs to be initialized first"):
        dist._register_stream(Stream())

    def body(rank: int) -> None:
        assert dist._register_stream(Stream()) is None
        with pytest.raises(TypeError, match="needs a stream"):
            dist._register_stream(7)

    run_threads(body, 1)


def test_clear_group_cache() -> None:
    """Ends the groups of calls on lists; the next call on lists makes new ones."""

    def body(rank: int) -> None:
        for _ in range(2):
            xs = [np.ones(1), np.ones(1)]
            dist.all_reduce_multigpu(xs)
            assert xs == [4, 4]
            dist.barrier()  # the other rank starts no thread between these
            before = threading.active_count()
            dist._clear_group_cache()
            assert threading.active_count() <= before
            dist.barrier()
        dist._clear_group_cache(dist.new_group([0, 1]))

    run_threads(body, 2)


START = """
import sys, warnings
import numpy as np
import cydist.deprecated as dist
rank = int(sys.argv[1])
"""


def run_ranks(tmp_path: Path, program: str) -> list[str]:
    """What each of two processes prints that run this program at once."""
    path = tmp_path / "program.py"
    path.write_text(START + program)
    started = [
        subprocess.Popen(
            [sys.executable, str(path), str(rank)], cwd=tmp_path, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ),
        )
        for rank in range(2)
    ]  # fmt: skip
    ended = []
    try:
        for each in started:
            out, err = each.communicate(timeout=50)
            assert each.returncode == 0, err
            ended.append(out.strip())
    finally:
        for each in started:
            each.kill()
            each.wait()
    return ended


INITS = {
    "file, ranks assigned": "'tcp', init_method=f'file://{here}/shared', world_size=2, "
    "group_name='one'",
    "file, ranks given": "backend='gloo', init_method=f'file://{here}/shared', world_size=2, "
    "rank=rank",
    "address": "'tcp', init_method='tcp://127.0.0.1:{port}', rank=rank, world_size=2",
    "multicast, ranks assigned": "'tcp', init_method='tcp://239.77.12.3:{port}', world_size=2, "
    "group_name='one'",
    "variables": "'tcp', world_size=2, rank=rank",
}


@pytest.mark.parametrize("arguments", INITS.values(), ids=INITS)
def test_examples_of_the_start(
    tmp_path: Path, arguments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The documents' ways to start a job; afterwards the package is as before its start."""
    port = str(free_port())
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    program = f"""
assert not dist.is_initialized() and dist._initialized == 0 and dist._backend == -1
here = {str(tmp_path)!r}
dist.init_process_group({arguments.replace("{port}", port)})
assert dist.is_initialized() and dist._initialized == dist._INITIALIZED_PG
assert dist._backend == dist.dist_backend.{"GLOO" if "gloo" in arguments else "TCP"}
tensor_list = [np.array([1.0], np.float32) for dev_idx in range(8)]
dist.all_reduce_multigpu(tensor_list)
print(sorted(float(x[0]) for x in tensor_list))
try:
    dist.init_process_group("tcp")
except RuntimeError as error:
    print(error)
dist.destroy_process_group()
assert not dist.is_initialized()
"""
    expected = f"{[16.0] * 8}\ntrying to initialize torch.distributed twice!"
    assert run_ranks(tmp_path, program) == [expected] * 2


def test_master_worker(tmp_path: Path) -> None:
    """Warns, joins and gives ranks; collectives say that they are for process groups."""
    program = """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    dist.init_master_worker("tcp", init_method="file:///HERE/shared", rank=rank, world_size=2)
assert "experimental" in str(caught[-1].message)
assert (dist.get_rank(), dist.get_world_size()) == (rank, 2)
assert not dist.is_initialized() and dist._initialized == dist._INITIALIZED_MW
for call in (dist.barrier, lambda: dist.all_reduce_multigpu([np.ones(1)])):
    try:
        call()
    except AssertionError as error:
        print(error)
dist.destroy_process_group()
dist.init_process_group("tcp", init_method="file:///HERE/again", rank=rank, world_size=2)
dist.barrier()
dist.destroy_process_group()
""".replace("/HERE", str(tmp_path))
    said = "\n".join(["collective only supported in process-group mode"] * 2)
    assert run_ranks(tmp_path, program) == [said] * 2


@pytest.mark.parametrize("start", [dist.init_process_group, dist.init_master_worker])
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"backend": "tcp", "timeout": 3}, AssertionError),
        ({"backend": "carrier pigeon"}, RuntimeError),
    ],
    ids=["unknown keyword", "unknown backend"],
)
@pytest.mark.filterwarnings("ignore:init_master_worker")
def test_refused_starts(start: Any, arguments: dict[str, Any], expected: type[Exception]) -> None:
    """With the documented exceptions; nothing is started."""
    with pytest.raises(expected, match=r"unexpected keyword arguments: timeout|Invalid distrib"):
        start(**arguments)
    assert not cydist.is_initialized()


def test_the_launcher_of_the_documents(tmp_path: Path) -> None:
    """`python -m cydist.deprecated.launch` gives scripts --local-rank."""
    (tmp_path / "script.py").write_text("import sys; print(sys.argv[1:])")
    command = [sys.executable, "-m", "cydist.deprecated.launch", "--nproc_per_node=2", "script.py"]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, "PYTHONPATH": str(Path(cydist.__file__).parents[1])},
    )  # fmt: skip
    assert sorted(result.stdout.splitlines()) == [
        f"[{rank}] ['--local-rank={rank}']" for rank in range(2)
    ]
