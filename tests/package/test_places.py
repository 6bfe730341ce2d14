"""What stands in several places: docs/dev/contributing.md lists them, and each has what it must."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import kernel_inputs
import pytest

import cydist
from cydist import _native
from cydist._native import COLLECTIVE_NAMES, DTYPES, OPS
from cydist.backends.mpi import datatypes as mpi_datatypes
from cydist.backends.nccl import gpu_kernels
from cydist.backends.nccl import reductions as nccl_reductions
from cydist.bench import cases
from cydist.groups import derived
from cydist.groups.process_group import ProcessGroup
from cydist.reduce_ops import RedOpType, ReduceOp
from cydist.testing import oracle
from cydist.tuning import table

ROOT = Path(__file__).resolve().parents[2]
PAGE = "docs/dev/contributing.md"


def text(path: str) -> str:
    return (ROOT / path).read_text()


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.pyx"))


def algorithm_modules() -> dict[str, set[str]]:
    """The algorithms that each module of src/algorithms enters into the table."""
    entered = re.compile(r"^\s*implement(?:_all)?\(b\"(\w+)\"", re.M)
    return {path.stem: set(entered.findall(path.read_text())) for path in sources("src/algorithms")}


def links(transport: str) -> set[str]:
    """The classes of links in a folder of src/transports."""
    found = (path.read_text() for path in sources(f"src/transports/{transport}"))
    return {name for each in found for name in re.findall(r"^cdef class (\w+Link)\(", each, re.M)}


def stores() -> set[str]:
    """The kinds of stores that cydist/stores defines."""
    found = {"Store"}
    trees = [ast.parse(path.read_text()) for path in (ROOT / "cydist/stores").glob("*.py")]
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    for _ in range(2):  # a store may be of another kind of store
        for each in classes:
            if {base.id for base in each.bases if isinstance(base, ast.Name)} & found:
                found.add(each.name)
    return found - {"Store"}


# Every one that there is, of each kind.
THINGS: dict[str, set[str]] = {
    "dtype": set(DTYPES),
    "operation": set(OPS),
    "collective": set(COLLECTIVE_NAMES) - {"point_to_point", "monitored_barrier"},
    "algorithm": {name for _, name in table.NEEDS},
    "transport": {path.name for path in (ROOT / "src/transports").iterdir() if path.is_dir()},
    "store": stores(),
}


def dtype_code(name: str) -> str:
    """A dtype as C calls it."""
    kinds = (("uint", "U"), ("int", "I"), ("bfloat", "BF"), ("float", "F"), ("complex", "C"))
    for kind, short in kinds:
        if name.startswith(kind):
            return f"DT_{short}{name.removeprefix(kind).replace('_', '').upper()}"
    return f"DT_{name.upper()}"


def has(path: str, pattern: str) -> bool:
    return re.search(pattern, text(path), re.M) is not None


def says(path: str, written: Callable[[str], str]) -> Callable[[str], bool]:
    """Does the file have the word that stands for a thing?"""
    return lambda thing: has(path, rf"(?<!\w){re.escape(written(thing))}(?!\w)")


def defines(path: str, **other: str) -> Callable[[str], bool]:
    """Has the file a function of this name, or of the other name that it has there?"""
    return lambda thing: has(path, rf"^\s*(cdef object|def) {other.get(thing, thing)}\(")


def nccl_reduces(dtype: str, op: RedOpType) -> bool:
    if not _native.supports(int(op), DTYPES[dtype]):
        return True
    how = nccl_reductions.reduction(op, dtype)
    return how.op is None or how.dtype in nccl_reductions.TYPES


def torch_reductions() -> dict[str, tuple[object, dict[RedOpType, str]]]:
    from cydist.backends.torch.group import REDUCTIONS

    return REDUCTIONS


def torch_operations() -> set[str]:
    from cydist.interop.torch.options import REDUCTIONS

    named = text("cydist/interop/torch/options.py").count("PREMUL_SUM") > 0
    return {op.name for op in REDUCTIONS.values() if isinstance(op, RedOpType)} | (
        {"PREMUL_SUM"} if named else set()
    )


def is_chosen(collective: str) -> bool:
    """Has a call an algorithm, with windows and without?"""
    try:
        for windows in (False, True):
            table.choose(collective, 1 << 20, 3, windows, even=True, commutative=True)
    except LookupError:
        return False
    return True


def rows(algorithm: str) -> set[str]:
    """The collectives for which docs/dev/algorithms.md has a row of this algorithm."""
    row = rf"^\| `(\w+)` \| `{algorithm}` \|"
    return set(re.findall(row, text("docs/dev/algorithms.md"), re.M))


KERNELS, KERNELS_PXD = "src/kernels/kernels.h", "cydist/_native/kernels.pxd"
KERNELS_PYX, LOOPS = "src/kernels/kernels.pyx", "src/kernels/reduce_body.h"
CONTRACT, INPUTS = "cydist/testing/test_collectives.py", "tests/support/kernel_inputs.py"
MPI, NCCL = "cydist/backends/mpi/datatypes.py", "cydist/backends/nccl/reductions.py"
# What a backend calls each collective.
RUN = {name: f"run_{name.removeprefix('ex')}" for name in COLLECTIVE_NAMES}
TORCH, TORCH_OPS = "cydist/backends/torch/group.py", "cydist/interop/torch/options.py"
MPI4PY = "docs/guide/mpi4py.md"
SINGLE = {
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single",
}
TORCH_NAMES = {"all_reduce": "allreduce", "all_gather": "allgather", "all_to_all": "alltoall"}
VALUES = {"stream": "tcp", "shm": "shm", "mpi": "mpi"}  # of CYDIST_TRANSPORT
RANKS = {"stream": "tcp", "shm": "shm", "inproc": "inproc"}

# Of each kind and place: is a thing there?
PLACES: dict[tuple[str, str], Callable[[str], bool]] = {
    ("dtype", KERNELS): says(KERNELS, dtype_code),
    ("dtype", KERNELS_PXD): says(KERNELS_PXD, dtype_code),
    ("dtype", KERNELS_PYX): lambda name: has(
        KERNELS_PYX, rf"\(\"{name}\", {dtype_code(name)}, \d+\)"
    ),
    ("dtype", LOOPS): lambda name: has(LOOPS, rf"\[{dtype_code(name)}\] = (\w+_ROW|{{)"),
    ("dtype", "src/arrays/asarray.pyx"): says("src/arrays/asarray.pyx", dtype_code),
    ("dtype", MPI): lambda name: name in mpi_datatypes.REDUCTIONS,
    ("dtype", NCCL): lambda name: (
        name in DTYPES and all(nccl_reduces(name, op) for op in RedOpType)
    ),
    ("dtype", TORCH): lambda name: name in torch_reductions(),
    ("dtype", INPUTS): lambda name: name in {str(each) for each in kernel_inputs.DTYPES},
    ("operation", KERNELS): says(KERNELS, "OP_{}".format),
    ("operation", KERNELS_PXD): says(KERNELS_PXD, "OP_{}".format),
    ("operation", KERNELS_PYX): lambda name: has(KERNELS_PYX, rf"\"{name}\": OP_{name}\b"),
    ("operation", LOOPS): lambda name: has(LOOPS, rf"\[OP_{name}\] = "),
    ("operation", "cydist/reduce_ops.py"): lambda name: (
        name in RedOpType.__members__
        and int(RedOpType[name]) == OPS[name]
        and hasattr(ReduceOp, name)
        and name in (ReduceOp.__doc__ or "")
    ),
    ("operation", MPI): lambda name: any(
        name == op.name for _, ops in mpi_datatypes.REDUCTIONS.values() for op in ops
    ),
    ("operation", NCCL): lambda name: (
        name in {op.name for op in (*nccl_reductions.OPERATIONS, *nccl_reductions.BITS)}
    ),
    ("operation", "cydist/backends/nccl/gpu_kernels.py"): lambda name: name in gpu_kernels.COMBINE,
    ("operation", TORCH): lambda name: any(
        name == op.name for _, ops in torch_reductions().values() for op in ops
    ),
    ("operation", TORCH_OPS): lambda name: name in torch_operations(),
    ("operation", "cydist/testing/oracle.py"): lambda name: name in oracle._COMBINE,
    ("operation", INPUTS): lambda name: (
        name in (*kernel_inputs.ARITHMETIC, *kernel_inputs.ORDER, *kernel_inputs.BITS)
    ),
    ("operation", "docs/guide/torch.md"): lambda name: has(
        "docs/guide/torch.md", rf"^- Reductions: .*\b{name}\b"
    ),
    ("operation", MPI4PY): says(MPI4PY, str),
    ("collective", "cydist/_native/abi.pxd"): lambda name: (
        name in COLLECTIVE_NAMES
        and has("cydist/_native/abi.pxd", rf"^    {name.upper()} = {COLLECTIVE_NAMES.index(name)}$")
        and has("cydist/_native/abi.pxd", rf"^    #   (\w+, )?{name}\b")
    ),
    ("collective", "src/abi/abi.pyx"): says("src/abi/abi.pyx", '"{}"'.format),
    ("collective", "cydist/groups/process_group.py"): lambda name: hasattr(
        ProcessGroup, RUN.get(name, name)
    ),
    ("collective", "cydist/backends/host/group.py"): defines(
        "cydist/backends/host/group.py", **RUN
    ),
    ("collective", "cydist/backends/nccl/group.py"): defines(
        "cydist/backends/nccl/group.py", **RUN
    ),
    ("collective", "cydist/backends/nccl/plans.py"): defines("cydist/backends/nccl/plans.py"),
    ("collective", TORCH): defines(TORCH, **RUN),
    ("collective", "src/algorithms/mpi/mpi_collectives.pyx"): lambda name: has(
        "src/algorithms/mpi/mpi_collectives.pyx", rf"^implement\(b\"native\", {name.upper()},"
    ),
    ("collective", "cydist/tuning/table.py"): is_chosen,
    ("collective", "cydist/api/collectives.py"): lambda name: any(
        defines(f"cydist/api/{path.name}")(name) for path in (ROOT / "cydist/api").glob("*.py")
    ),
    ("collective", "cydist/__init__.py"): lambda name: name in cydist.__all__,
    ("collective", "src/fastpath/fast_api.pyx"): defines("src/fastpath/fast_api.pyx", **SINGLE),
    ("collective", "src/fastpath/fast_collectives.pyx"): lambda name: has(
        "src/fastpath/fast_collectives.pyx", rf"^cpdef int {SINGLE.get(name, name)}\("
    ),
    ("collective", "cydist/_native/fast_collectives.pxd"): lambda name: has(
        "cydist/_native/fast_collectives.pxd", rf"^cpdef int {SINGLE.get(name, name)}\("
    ),
    ("collective", "cydist/_native/fast_collectives.pyi"): defines(
        "cydist/_native/fast_collectives.pyi", **SINGLE
    ),
    ("collective", "cydist/backends/host/staging_group.py"): defines(
        "cydist/backends/host/staging_group.py", **RUN
    ),
    ("collective", "cydist/groups/derived.py"): lambda name: (
        hasattr(derived, name.removeprefix("ex"))
        and (name not in table.REDUCING or hasattr(derived.UserOpReducer, RUN.get(name, name)))
    ),
    ("collective", "src/fastpath/fast_nccl.pyx"): defines("src/fastpath/fast_nccl.pyx", **SINGLE),
    ("collective", "cydist/interop/torch/group.py"): defines(
        "cydist/interop/torch/group.py", **TORCH_NAMES
    ),
    ("collective", "cydist/bench/cases.py"): lambda name: name in cases.OPS + cases.MORE_OPS,
    ("collective", "cydist/bench/buffers.py"): says("cydist/bench/buffers.py", '"{}"'.format),
    ("collective", "cydist/bench/peers.py"): says("cydist/bench/peers.py", '"{}"'.format),
    ("collective", "cydist/testing/test_mismatches.py"): says(
        "cydist/testing/test_mismatches.py", '"{}"'.format
    ),
    ("collective", CONTRACT): lambda name: has(
        CONTRACT, rf"^def test_(\w+_)?(?<!all_)(?<!reduce_){name}(_|\()"
    ),
    ("collective", "tests/support/valid_calls.py"): says(
        "tests/support/valid_calls.py", '"{}":'.format
    ),
    ("collective", "tests/support/collective_cases.py"): lambda name: has(
        "tests/support/collective_cases.py", rf"case .*\"{name}\""
    ),
    ("collective", "tests/support/recorded_calls.py"): says(
        "tests/support/recorded_calls.py", '"{}":'.format
    ),
    ("collective", "tests/programs/every_call.py"): says(
        "tests/programs/every_call.py", "dist.{}".format
    ),
    ("collective", "tests/programs/fork_server.py"): defines("tests/programs/fork_server.py"),
    ("collective", "tests/faults/test_deaths.py"): says(
        "tests/faults/test_deaths.py", '"{}"'.format
    ),
    ("collective", MPI4PY): lambda name: has(MPI4PY, rf"dist\.({name}|{SINGLE.get(name, name)})\("),
    ("collective", "README.md"): lambda name: has("README.md", rf"^- \*\*Calls\*\*: .*\b{name}\b"),
    ("collective", "docs/dev/algorithms.md"): lambda name: (
        {each for each, known in table.NEEDS if each == name} == {name}
        and all(name in rows(known) for each, known in table.NEEDS if each == name)
    ),
    ("algorithm", "src/algorithms/"): lambda name: any(
        name in entered for entered in algorithm_modules().values()
    ),
    ("algorithm", "src/abi/algorithm_table.pyx"): lambda name: has(
        "src/abi/algorithm_table.pyx", rf"^    \(\d+, b\"{name}\", [A-Z_]+, "
    ),
    ("algorithm", "src/engine/group.pyx"): lambda name: any(
        name in entered and has("src/engine/group.pyx", rf"^    .*\"{module}\",")
        for module, entered in algorithm_modules().items()
    ),
    ("algorithm", "cydist/tuning/table.py"): lambda name: any(
        rule.name == name for rule in (*table.TABLE, *table.DETERMINISTIC_TABLE)
    ),
    ("algorithm", "tests/algorithms/test_selection.py"): lambda name: has(
        "tests/algorithms/test_selection.py", rf'"{name}":?'
    ),
    ("algorithm", "docs/dev/algorithms.md"): lambda name: (
        rows(name) != set()
        and rows(name) == {each for each, known in table.NEEDS if known == name}
        and has("docs/dev/algorithms.md", rf"^\| (`\w+`, )*`{name}`(, `\w+`)* \| [^`]")
    ),
    ("transport", "src/transports/"): lambda name: links(name) != set(),
    ("transport", "cydist/_native/__init__.py"): lambda name: bool(
        links(name) & set(_native.__all__)
    ),
    ("transport", "cydist/backends/host/shm_setup.py"): lambda name: (
        name in VALUES
        and has("cydist/backends/host/shm_setup.py", rf"\(\"auto\".*\"{VALUES[name]}\"")
    ),
    ("transport", "cydist/_native/__init__.pyi"): lambda name: any(
        has("cydist/_native/__init__.pyi", rf"^class {link}\b") for link in links(name)
    ),
    ("transport", "cydist/config.py"): lambda name: has(
        "cydist/config.py", rf"\"(.*\W)?{VALUES.get(name, name)}: "
    ),
    ("transport", "tests/support/transport_ranks.py"): lambda name: (
        name in RANKS and has("tests/support/transport_ranks.py", rf"return \[.*\"{RANKS[name]}\"")
    ),
    ("transport", "docs/dev/architecture.md"): lambda name: has(
        "docs/dev/architecture.md", rf"^\|.*`(?:transports/)?{name}/`"
    ),
    ("store", "cydist/stores/"): lambda name: name in stores(),
    ("store", "cydist/stores/__init__.py"): says("cydist/stores/__init__.py", '"{}"'.format),
    ("store", "cydist/__init__.py"): lambda name: name in cydist.__all__,
    ("store", "tests/stores/test_store_contract.py"): lambda name: has(
        "tests/stores/test_store_contract.py", rf"\b{name}(\(|,)"
    ),
    ("store", "tests/engine/test_ctrl_c.py"): says("tests/engine/test_ctrl_c.py", "dist.{}".format),
    ("store", "tests/engine/test_long_timeouts.py"): says(
        "tests/engine/test_long_timeouts.py", str
    ),
    ("store", "README.md"): says("README.md", "`{}`".format),
}

BY_MESSAGES = {"gather", "scatter", "scan", "exscan"}  # over MPI, too
SMALL_FLOATS = {"float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"}
# What is not there, and why it need not be.
WITHOUT: dict[tuple[str, str], set[str]] = {
    ("dtype", MPI): SMALL_FLOATS,  # MPI has none
    ("dtype", TORCH): {  # gloo has none, or none that reduces
        "int16", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2",
    },
    ("operation", MPI): {"AVG", "PREMUL_SUM"},  # MPI has none
    ("operation", TORCH): {"AVG", "PREMUL_SUM"},  # gloo has none
    ("operation", "cydist/backends/nccl/gpu_kernels.py"): {  # by NCCL
        "SUM", "MIN", "MAX", "AVG", "PREMUL_SUM",
    },
    ("operation", "cydist/testing/oracle.py"): {"PREMUL_SUM"},  # SUM, of other contributions
    ("collective", TORCH): {"scan", "exscan", "barrier"},  # made of messages
    ("collective", "cydist/backends/nccl/plans.py"): {"scan", "exscan", "barrier"},  # none, no plan
    ("collective", "src/algorithms/mpi/mpi_collectives.pyx"): BY_MESSAGES,
    ("collective", "cydist/bench/buffers.py"): {"barrier"},
    ("collective", "cydist/interop/torch/group.py"): {"scan", "exscan"},
    ("collective", "src/fastpath/fast_nccl.pyx"): {  # several calls of NCCL, or none
        "gather", "scatter", "scan", "exscan", "barrier",
    },
    ("collective", "tests/support/valid_calls.py"): {"barrier"},  # takes no array
    ("transport", "cydist/backends/host/shm_setup.py"): {"inproc"},  # a backend of its own
    ("transport", "cydist/config.py"): {"inproc"},
    ("transport", "tests/support/transport_ranks.py"): {"mpi"},  # processes: tests/backends/mpi
    ("store", "cydist/__init__.py"): {"MembershipStore"},  # made by the rendezvous
    ("store", "tests/engine/test_ctrl_c.py"): {"PrefixStore", "MembershipStore"},  # another's waits
    ("store", "tests/engine/test_long_timeouts.py"): {"PrefixStore", "MembershipStore"},
    ("store", "README.md"): {"MembershipStore"},
}  # fmt: skip

NEEDS_TORCH = {("dtype", TORCH), ("operation", TORCH), ("operation", TORCH_OPS)}


def listed() -> list[tuple[str, str]]:
    """The places that the page lists: kind and path."""
    page = text(PAGE).partition("\n## Where things are added\n")[2].partition("\n## ")[0]
    parts = re.findall(r"^### A new (\w+)\n\n((?:- .*\n)+)", page, re.M)
    return [
        (kind, path) for kind, part in parts for path in re.findall(r"^- `([^`]+)`: ", part, re.M)
    ]


def place_id(place: tuple[str, str]) -> str:
    return f"{place[0]}-{place[1]}"


def test_the_page_lists_what_is_looked_at() -> None:
    """Each place on the page exists, and is looked at; no other is."""
    assert [path for _, path in listed() if not (ROOT / path).exists()] == []
    assert sorted(listed()) == sorted(PLACES)


@pytest.mark.parametrize("place", PLACES, ids=place_id)
def test_each_is_in_every_place(place: tuple[str, str]) -> None:
    """All that there are of the kind are in this place, but for those that need not be."""
    if place in NEEDS_TORCH and importlib.util.find_spec("torch") is None:
        pytest.skip("no torch")
    things = THINGS[place[0]]
    assert len(things) > 2
    missing = {thing for thing in things if not PLACES[place](thing)}
    assert missing == WITHOUT.get(place, set())


@pytest.mark.parametrize("place", PLACES, ids=place_id)
def test_one_that_is_forgotten_is_missed(place: tuple[str, str]) -> None:
    """One that is in no place is found missing in each."""
    if place in NEEDS_TORCH and importlib.util.find_spec("torch") is None:
        pytest.skip("no torch")
    assert not PLACES[place]("forgotten")


def test_codes_are_those_of_c() -> None:
    """The order of names is the order of C's enums, which is part of the wire format."""
    enums = {
        name: re.findall(r"^    ((?:DT|OP)_\w+)", body, re.M)
        for body, name in re.findall(r"typedef enum {\n(.*?)} (\w+);", text(KERNELS), re.S)
    }
    codes = {dtype_code(name): code for name, code in DTYPES.items()}
    assert codes == {
        name: code for code, name in enumerate(enums["cydist_dtype"])
        if name not in ("DT_OTHER", "DT_COUNT")
    }  # fmt: skip
    assert {f"OP_{name}": code for name, code in OPS.items()} == {
        name: code for code, name in enumerate(enums["cydist_op"])
        if name not in ("OP_NONE", "OP_COUNT")
    }  # fmt: skip
    assert {op.name: int(op) for op in RedOpType} == OPS
