"""Every public call that takes arrays or objects, with right arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

SIZE = 2
Arguments = dict[str, Any]


def one() -> np.ndarray:
    """A rank's block."""
    return np.zeros(4, "f4")


def whole() -> np.ndarray:
    """A block for each rank."""
    return np.zeros(4 * SIZE, "f4")


def many() -> list[np.ndarray]:
    """A list with an entry for each rank."""
    return [one() for _ in range(SIZE)]


# Every call that takes arrays, with right arguments of rank 0. OUTPUTS and INPUTS say which of
# them are written and read; both names at once: reduced in place.
CALLS: dict[str, Callable[[], Arguments]] = {
    "broadcast": lambda: {"tensor": one(), "src": 1},
    "all_reduce": lambda: {"tensor": one()},
    "reduce": lambda: {"tensor": one(), "dst": 0},
    "scan": lambda: {"tensor": one()},
    "exscan": lambda: {"tensor": one()},
    "all_gather": lambda: {"tensor_list": many(), "tensor": one()},
    "all_gather_into_tensor": lambda: {"output_tensor": whole(), "input_tensor": one()},
    "gather": lambda: {"gather_list": many(), "tensor": one(), "dst": 0},
    "scatter": lambda: {"tensor": one(), "scatter_list": many(), "src": 0},
    "reduce_scatter": lambda: {"output": one(), "input_list": many()},
    "reduce_scatter_tensor": lambda: {"output": one(), "input": whole()},
    "all_to_all": lambda: {"output_tensor_list": many(), "input_tensor_list": many()},
    "all_to_all_single": lambda: {"output": whole(), "input": whole()},
    "all_reduce_coalesced": lambda: {"tensors": many()},
    "all_gather_coalesced": lambda: {
        "output_tensor_lists": [many(), many()],
        "input_tensor_list": many(),
    },
    "all_gather_into_tensor_coalesced": lambda: {
        "output_tensors": [whole(), whole()],
        "input_tensors": many(),
    },
    "reduce_scatter_tensor_coalesced": lambda: {
        "outputs": many(),
        "inputs": [whole(), whole()],
    },
    "send": lambda: {"tensor": one(), "dst": 1},
    "isend": lambda: {"tensor": one(), "dst": 1},
    "recv": lambda: {"tensor": one(), "src": 1},
    "irecv": lambda: {"tensor": one(), "src": 1},
}
OBJECT_CALLS: dict[str, Callable[[], Arguments]] = {
    "all_gather_object": lambda: {"object_list": [None] * SIZE, "obj": 1},
    "broadcast_object_list": lambda: {"object_list": [1], "src": 0},
    "gather_object": lambda: {"obj": 1, "object_gather_list": [None] * SIZE, "dst": 0},
    "scatter_object_list": lambda: {
        "scatter_object_output_list": [None],
        "scatter_object_input_list": [1, 2],
        "src": 0,
    },
    "send_object_list": lambda: {"object_list": [1], "dst": 1},
    "recv_object_list": lambda: {"object_list": [1], "src": 1},
}


def of_one_rank(name: str) -> Arguments:
    """Right arguments of a collective in a group of one rank."""
    arguments = {
        name: 0 if name in ("src", "dst") else shrunk(value)
        for name, value in CALLS[name]().items()
    }
    lists = {"all_gather": "tensor_list", "gather": "gather_list", "scatter": "scatter_list",
             "reduce_scatter": "input_list"}  # fmt: skip
    if name in lists:
        arguments[lists[name]] = arguments[lists[name]][:1]
    elif name == "all_to_all":
        arguments = {key: value[:1] for key, value in arguments.items()}
    elif name == "all_gather_coalesced":
        arguments["output_tensor_lists"] = arguments["output_tensor_lists"][:1]
    return arguments


def shrunk(value: Any) -> Any:
    """The part of an argument for two ranks that one has."""
    if isinstance(value, np.ndarray):
        return value[:4].copy()
    return [shrunk(each) for each in value]
