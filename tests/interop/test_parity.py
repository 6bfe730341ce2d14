"""torch.distributed (gloo) and cydist give the same, on tensors and on numpy's arrays.

Calls that differ on purpose have a row in docs/guide/from_torch.md, which the tests read.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import cydist

torch = pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests/programs/parity.py"
OURS = ("cydist, torch", "cydist, numpy")

sys.path.insert(0, str(PROGRAM.parent))
from parity import AFTER, CASES, EDGES, UNCHECKED_BY_GLOO  # noqa: E402

# Functions of both libraries without a case, and where they are tested.
ELSEWHERE = {
    "destroy_process_group": "every program ends with it",
    "get_group_rank": "groups", "get_global_rank": "groups", "new_group": "groups",
    "get_process_group_ranks": "groups", "is_initialized": "get_rank_and_get_world_size",
    "get_rank": "get_rank_and_get_world_size", "get_world_size": "get_rank_and_get_world_size",
    "is_available": "get_rank_and_get_world_size", "send": "send_and_recv",
    "recv": "send_and_recv", "isend": "isend_and_irecv", "irecv": "isend_and_irecv",
    "send_object_list": "send_object_list_and_recv_object_list",
    "recv_object_list": "send_object_list_and_recv_object_list",
    "is_backend_available": "get_backend", "is_gloo_available": "get_backend",
    "is_xccl_available": "is_ucc_available",
    "get_default_backend_for_device": "get_backend_config",
    "is_nccl_available": "the build", "is_mpi_available": "the build",
    "get_debug_level": "debug_levels", "set_debug_level_from_env": "debug_levels",
    "breakpoint": "it takes commands: tests/api/test_debugging.py",
    "rendezvous": "it needs a URL of its own: tests/rendezvous/test_function.py",
    "register_rendezvous_handler": "likewise: tests/rendezvous/test_registered_handlers.py",
    "split_group": "gloo has none: tests/groups/test_subgroups.py",
    "shrink_group": "gloo has none: tests/groups/test_shrink.py",
}  # fmt: skip


def start(what: str, directory: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(PROGRAM), what, str(directory), *more]
    place = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        place.pop(name, None)
    place["LOCAL_RANK"] = what if what.isdigit() else "0"
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=place
    )


def found_by(processes: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """What each of these processes found."""
    found = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=55)
            assert process.returncode == 0, err[-2000:]
            found.append(json.loads(out.split("FOUND ")[1]))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return found


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The outcomes of all cases, by rank."""
    directory = tmp_path_factory.mktemp("parity")
    return found_by([start(str(rank), directory) for rank in range(2)])


@pytest.fixture(scope="module")
def edges(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcomes of all edge calls."""
    return found_by([start("edges", tmp_path_factory.mktemp("edges"))])[0]


def agree(theirs: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Whether both return the same, or cydist's exception is one of the class that torch raised."""
    if "returns" in theirs:
        return ours.get("returns", ours) == theirs["returns"]
    return theirs.get("raises", [None])[0] in ours.get("raises", ())


@pytest.mark.parametrize("side", OURS)
@pytest.mark.parametrize("name", CASES)
def test_both_give_the_same(by_rank: list[dict[str, Any]], name: str, side: str) -> None:
    """Results, return values and classes of exceptions, on both ranks."""
    for found in by_rank:
        theirs, ours = found[name]["gloo"], found[name][side]
        assert "raises" not in theirs or name == "init_process_group", theirs
        assert agree(theirs, ours), (theirs, ours)


def test_every_function_of_both_has_a_case() -> None:
    """A function that both libraries have is compared, or it is said where it is tested."""
    dist = torch.distributed
    both = {
        name
        for name in dir(dist)
        if not name.startswith("_")
        and name != "reduce_op"  # an attribute of it warns
        and inspect.isroutine(getattr(dist, name))
        and inspect.isroutine(getattr(cydist, name, None))
    }
    assert both - set(CASES) - set(ELSEWHERE) == set()
    assert len(both) >= 45


CLASSES = (
    "Backend", "BackendConfig", "DebugLevel", "DeviceMesh", "FileStore", "GroupMember", "HashStore",
    "P2POp", "PrefixStore", "ProcessGroup", "ReduceOp", "Store", "TCPStore", "Work", "group",
)  # fmt: skip
SET_LATER = {  # attributes of objects, which torch's classes have as properties
    "ProcessGroup.group_name", "ProcessGroup.group_desc", "DeviceMesh.device_type",
    "DeviceMesh.mesh", "DeviceMesh.mesh_dim_names", "DebugLevel.name", "DebugLevel.value",
}  # fmt: skip


NAMES_OF_TORCH = """
import json, sys
import torch.distributed as dist
classes = {each: dir(getattr(dist, each)) for each in sys.argv[1:]}
print(json.dumps({"distributed": dir(dist), **classes}))
"""


def missing() -> list[str]:
    """torch.distributed's names, its modules' and its classes' and their arguments, which cydist
    lacks."""
    theirs = torch.distributed
    # In a process of its own, since other tests import modules of torch.distributed and register
    # backends with it.
    command = [sys.executable, "-c", NAMES_OF_TORCH, *CLASSES]
    fresh = subprocess.run(command, capture_output=True, text=True, check=True, timeout=55).stdout
    names = json.loads(fresh)
    found = [name for name in names["distributed"] if not hasattr(cydist, name)]
    for module in ("distributed_c10d", "device_mesh", "rendezvous"):
        public = sys.modules[f"torch.distributed.{module}"].__all__
        found += [name for name in public if not hasattr(cydist, name)]
    for name in CLASSES:
        ours = getattr(cydist, name)
        found += [f"{name}.{each}" for each in names[name] if not hasattr(ours, each)]
    for name in dir(theirs):
        function = getattr(theirs, name) if name != "reduce_op" else None
        if inspect.isfunction(function) and inspect.isroutine(getattr(cydist, name, None)):
            ours = inspect.signature(getattr(cydist, name)).parameters
            for each, parameter in inspect.signature(function).parameters.items():
                if each not in ours and parameter.kind != inspect.Parameter.VAR_KEYWORD:
                    found.append(f"{name}({each}=)")
    found = [name for name in found if "_" not in (name[0], name.partition(".")[2][:1])]
    return sorted({*found} - SET_LATER - {"Backend.CYDIST"})


def test_names_that_cydist_lacks_have_a_reason() -> None:
    """Each stands in the table of what is left out, by its full name or that of its class's other
    numbers."""
    page = (ROOT / "docs/guide/from_torch.md").read_text()
    table = page.partition("## What is left out")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.*?) \| .+ \|$", table, re.M)
    named = {name for row in rows for name in re.findall(r"`(.*?)`", row)}
    assert [name for name in missing() if not {name, name.partition(".")[2]} & named] == []


@cache
def rows() -> dict[str, tuple[str, str]]:
    """The table of calls that differ: call -> what torch gives, what cydist gives."""
    page = (ROOT / "docs/guide/from_torch.md").read_text()
    found = re.findall(r"^\| `(dist\..*?)` \| (.*?) \| (.*?) \| .+ \|$", page, re.M)
    return {call: (theirs, ours) for call, theirs, ours in found}


def words(outcome: dict[str, Any]) -> str:
    """An outcome as the table has it."""
    if "raises" in outcome:
        return f"`{outcome['raises'][0]}`"
    return f"returns {outcome['returns']}"


@pytest.mark.parametrize("call", [*EDGES, *AFTER])
def test_edge_calls(edges: dict[str, Any], call: str) -> None:
    """A wrong or unusual call gives the same in both, or the table has what each gives."""
    sides = edges[call]
    ours = [words(sides[side]) for side in OURS]
    assert ours[0] == ours[1], sides
    if call in UNCHECKED_BY_GLOO:
        assert rows()[call] == ("may end the process", ours[0])
    elif all(agree(sides["gloo"], sides[side]) for side in OURS):
        assert call not in rows()
    else:
        assert rows().get(call) == (words(sides["gloo"]), ours[0]), sides


def test_the_table_has_no_other_calls() -> None:
    """Every row of the table is proven by a test."""
    assert set(rows()) <= {*EDGES, *AFTER}
    assert len(EDGES) >= 64
