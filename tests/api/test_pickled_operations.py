"""What users pickle, by this cydist or by an earlier one: the bytes name `cydist` alone."""

from __future__ import annotations

import copy
import inspect
import pickle
import pickletools
import subprocess
import sys
from typing import Any

import pytest

import cydist as dist

# As cydist wrote them while they were defined in cydist.types.
EARLIER = {
    "SUM": b"\x80\x04\x95$\x00\x00\x00\x00\x00\x00\x00\x8c\x0ccydist.types\x94\x8c\tRedOpType\x94"
    b"\x93\x94K\x01\x85\x94R\x94.",
    "PREMUL_SUM": b"\x80\x04\x95:\x00\x00\x00\x00\x00\x00\x00\x8c\x0ccydist.types\x94\x8c\t"
    b"PremulSum\x94\x93\x94)\x81\x94N}\x94\x8c\x06factor\x94G@\x00\x00\x00\x00\x00\x00\x00s\x86"
    b"\x94b.",
}
# And while pickles named the modules that define them.
LATER = {
    "SUM": b"\x80\x04\x95)\x00\x00\x00\x00\x00\x00\x00\x8c\x11cydist.reduce_ops\x94\x8c\t"
    b"RedOpType\x94\x93\x94K\x01\x85\x94R\x94.",
    "PREMUL_SUM": b"\x80\x04\x95?\x00\x00\x00\x00\x00\x00\x00\x8c\x11cydist.reduce_ops\x94\x8c\t"
    b"PremulSum\x94\x93\x94)\x81\x94N}\x94\x8c\x06factor\x94G@\x00\x00\x00\x00\x00\x00\x00s\x86"
    b"\x94b.",
}
OPERATIONS = {"SUM": dist.ReduceOp.SUM, "PREMUL_SUM": dist.ReduceOp.PREMUL_SUM(2.0)}
EARLIER_ERROR = (
    b"\x80\x04\x95g\x00\x00\x00\x00\x00\x00\x00\x8c\rcydist.errors\x94\x8c\x0fPeerFailedError"
    b"\x94\x93\x94\x8c\x04gone\x94\x85\x94R\x94}\x94(\x8c\x02op\x94\x8c\nall_reduce\x94\x8c\x03seq"
    b"\x94K\x07\x8c\x05group\x94\x8c\x010\x94\x8c\x05ranks\x94K\x01\x85\x94ub."
)

CLASSES = [name for name in dist.__all__ if inspect.isclass(getattr(dist, name))]
FUNCTIONS = [name for name in dist.__all__ if inspect.isroutine(getattr(dist, name))]
VALUES: dict[str, Any] = {
    **{name: getattr(dist, name) for name in CLASSES + FUNCTIONS},
    **{f"op {op.name}": op for op in dist.ReduceOp.RedOpType},
    "op factory": dist.ReduceOp.PREMUL_SUM,
    "op with a factor": dist.ReduceOp.PREMUL_SUM(2.5),
    "op MAXLOC": dist.ReduceOp.MAXLOC,
    "op MINLOC": dist.ReduceOp.MINLOC,
    "op of a function": dist.ReduceOp.create(max, commutative=False),
    "types of operations": dist.ReduceOp.RedOpType,
    "backend": dist.Backend("tcp"),
    "options": dist.ProcessGroupNCCL.Options(is_high_priority_stream=True),
    "error of spawn": dist.ProcessExitedException("m", 1, 2, 3, "SIGKILL"),
    **{
        f"error {name}": kind("text", **{"answered": False} if "Store" in name else {"seq": 7})
        for name in CLASSES
        if issubclass(kind := getattr(dist, name), dist.DistError)
        and not issubclass(kind, dist.ProcessException | dist.QueueEmptyError)
    },
}


def said(value: object) -> str:
    """All of a value that can be seen: an error's fields, too."""
    return f"{value!r} {sorted(getattr(value, '__dict__', {}).items())}"


def modules_in(data: bytes) -> set[str]:
    """The modules that a pickle of protocol 2 names."""
    arguments = (arg for op, arg, _ in pickletools.genops(data) if op.name == "GLOBAL")
    return {str(argument).split()[0] for argument in arguments}


@pytest.fixture(scope="module")
def loaded() -> dict[str, tuple[str, str]]:
    """What a fresh interpreter makes of each value's pickle, and the module of its type."""
    program = (
        "import pickle, sys\n"
        "def said(value):\n"
        "    return f\"{value!r} {sorted(getattr(value, '__dict__', {}).items())}\"\n"
        "def load(data):\n"
        "    value = pickle.loads(data)\n"
        "    kind = value if isinstance(value, type) else type(value)\n"
        "    text = '' if isinstance(value, type) else said(value)\n"
        "    return text, kind.__module__, pickle.dumps(value, 2)\n"
        "values = pickle.load(sys.stdin.buffer)\n"
        "assert 'cydist' not in sys.modules\n"
        "pickle.dump({name: load(data) for name, data in values.items()}, sys.stdout.buffer)\n"
    )
    pickles = pickle.dumps({name: pickle.dumps(value, 2) for name, value in VALUES.items()})
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, input=pickles, check=True, capture_output=True, timeout=50)
    made: dict[str, tuple[str, str]] = pickle.loads(done.stdout)
    return made


@pytest.mark.parametrize("name", CLASSES)
def test_public_classes_are_cydists(name: str) -> None:
    """Pickles, tracebacks and help() name `cydist`, as users do, for every public class."""
    kind = getattr(dist, name)
    assert (kind.__module__, kind.__qualname__) == ("cydist", name)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_are_cydists(name: str) -> None:
    """So for functions, the compiled ones too."""
    assert getattr(dist, name).__module__ == "cydist"


@pytest.mark.parametrize("name", VALUES)
def test_a_pickle_names_no_module_that_may_move(name: str) -> None:
    """Of cydist's modules its bytes name `cydist` only."""
    named = modules_in(pickle.dumps(VALUES[name], 2))
    assert named
    assert named <= {"cydist", "builtins", "__builtin__", "copy_reg", "__main__"}


@pytest.mark.parametrize("name", VALUES)
def test_a_fresh_process_loads_it(name: str, loaded: dict[str, Any]) -> None:
    """It is what it was, and is pickled there to the same bytes."""
    value = VALUES[name]
    text, module, again = loaded[name]
    assert again == pickle.dumps(value, 2)
    if isinstance(value, type):
        assert module == "cydist"
    elif name not in FUNCTIONS:
        assert text == said(value)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_and_copy(protocol: int) -> None:
    """All protocols of pickle, and copies, give an equal value; what there is once stays one."""
    for value in VALUES.values():
        data = pickle.dumps(value, protocol)
        for twin in (pickle.loads(data), copy.copy(value), copy.deepcopy(value)):
            assert type(twin) is type(value)
            assert isinstance(value, type) or said(twin) == said(value)
    for one in (dist.ReduceOp.MAXLOC, dist.ReduceOp.PREMUL_SUM, dist.ReduceOp.SUM):
        assert pickle.loads(pickle.dumps(one, protocol)) is one


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_that_was_pickled_loads(name: str) -> None:
    """It is the same operation, wherever its class is defined now."""
    for data in (EARLIER[name], LATER[name], pickle.dumps(OPERATIONS[name])):
        assert repr(pickle.loads(data)) == repr(OPERATIONS[name])


def test_an_earlier_error_loads() -> None:
    """An error that named the module of errors is the same class, with what it knew."""
    error = pickle.loads(EARLIER_ERROR)
    assert type(error) is dist.PeerFailedError
    assert (error.op, error.seq, error.group, error.ranks) == ("all_reduce", 7, "0", (1,))
