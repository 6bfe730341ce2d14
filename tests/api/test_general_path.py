"""A general call resolves its group once, and does no work twice: functions and calls of compiled
code are counted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from entered_functions import entered_functions

import cydist as dist
from cydist.testing import run_threads

# Python functions that a call may run, and calls of compiled code. Checks of a root, of lists and
# of overlaps come on top of what an all_reduce takes.
MOST_FUNCTIONS = {
    "all_reduce": 18,
    "all_reduce of a strided array": 21,
    "broadcast": 22,
    "reduce": 23,
    "all_gather_into_tensor": 22,
    "reduce_scatter_tensor": 23,
    "all_to_all_single": 23,
    "scan": 19,
    "barrier": 22,
}
MOST_FUNCTIONS_OF_OTHERS = 31
MOST_COMPILED_CALLS = {"all_reduce": 6, "broadcast": 5, "scan": 6, "barrier": 4}
MOST_COMPILED_CALLS_OF_OTHERS = 10


def ones(count: int = 4) -> np.ndarray[Any, Any]:
    return np.ones(count, np.float32)


# A timeout of its own sends a call down the general path.
CALLS: dict[str, Callable[[], object]] = {
    "all_reduce": lambda: dist.all_reduce(ones(), timeout=60),
    "all_reduce of a strided array": lambda: dist.all_reduce(ones(8)[::2], timeout=60),
    "broadcast": lambda: dist.broadcast(ones(), 0, timeout=60),
    "reduce": lambda: dist.reduce(ones(), 0, timeout=60),
    "all_gather": lambda: dist.all_gather([ones()], ones(), timeout=60),
    "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(ones(), ones(), timeout=60),
    "gather": lambda: dist.gather(ones(), [ones()], timeout=60),
    "scatter": lambda: dist.scatter(ones(), [ones()], timeout=60),
    "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(ones(), ones(), timeout=60),
    "all_to_all_single": lambda: dist.all_to_all_single(ones(), ones(), timeout=60),
    "scan": lambda: dist.scan(ones(), timeout=60),
    "barrier": lambda: dist.barrier(timeout=60),
}


class Counted:
    """An object of compiled code that notes which of its methods are called."""

    def __init__(self, inner: Any, called: list[str]) -> None:
        self.__dict__.update(inner=inner, called=called)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        return counted(found, name, self.called) if callable(found) else found

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.inner, name, value)


def counted(function: Any, name: str, called: list[str]) -> Any:
    def call(*arguments: Any, **named: Any) -> Any:
        called.append(name)
        return function(*arguments, **named)

    return call


def compiled_calls_of(call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run the call; return the compiled functions and methods of groups that it called, in
    order."""
    called: list[str] = []
    group: Any = dist.group.WORLD
    with monkeypatch.context() as patch:
        patch.setattr(group, "native", Counted(group.native, called))
        patch.setattr(group, "call_queue", Counted(group.call_queue, called))
        for module in [each for name, each in sys.modules.items() if name.startswith("cydist.")]:
            for name, value in list(vars(module).items()):
                if type(value).__name__ == "cython_function_or_method" and not hasattr(
                    value, "__wrapped__"
                ):
                    patch.setattr(module, name, counted(value, name, called))
        call()
    return called


@pytest.mark.parametrize("name", CALLS)
def test_functions_of_a_call(name: str) -> None:
    """A general call runs few Python functions, and asks once which group serves the memory."""

    def body(rank: int) -> list[str]:
        CALLS[name]()
        return entered_functions(CALLS[name])

    (functions,) = run_threads(body, 1, "tcp")
    assert len(functions) <= MOST_FUNCTIONS.get(name, MOST_FUNCTIONS_OF_OTHERS), "\n".join(
        functions
    )
    assert functions.count("HostGroup.for_device") == 1
    assert functions.count("Prepared.__init__") == 1


@pytest.mark.parametrize("name", CALLS)
def test_compiled_calls_of_a_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A general call calls compiled code a few times only, and runs there once."""

    def body(rank: int) -> list[str]:
        CALLS[name]()
        return compiled_calls_of(CALLS[name], monkeypatch)

    (compiled_calls,) = run_threads(body, 1, "tcp")
    assert len(compiled_calls) <= MOST_COMPILED_CALLS.get(name, MOST_COMPILED_CALLS_OF_OTHERS), (
        compiled_calls
    )
    assert compiled_calls.count("run_as_chosen") == 1
    assert "run" not in compiled_calls
