"""What errors say: the call, the group by a name that the user knows, what is wrong, what to do."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist.errors import disagreement
from cydist.group_names import GroupName
from cydist.testing import run_threads


def dst_without_list() -> None:
    """Gather on its destination, without the list."""
    if dist.get_rank() == 0:
        dist.gather(np.ones(2), None, dst=0)
    else:
        raise TypeError("gather: rank 0 is dst and must pass gather_list as a list of 2 ")


def src_without_list() -> None:
    """Scatter on its source, without the list."""
    if dist.get_rank() == 0:
        dist.scatter(np.ones(2), None, src=0)
    else:
        raise TypeError("scatter: rank 0 is src and must pass scatter_list as a list of 2 ")


def source_of_a_send() -> None:
    """Ask a send for its sender."""
    peer = 1 - dist.get_rank()
    work = dist.isend(np.ones(1), peer)
    dist.recv(np.ones(1), peer)
    assert work is not None
    work.source_rank()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: dist.all_reduce(np.ones(1), op="sum"), "all_reduce: op must be a ReduceOp "),
        (
            lambda: dist.reduce_scatter_tensor(np.ones(1), np.ones(2), op=None),
            "reduce_scatter_tensor: op must be a ReduceOp ",
        ),
        (lambda: dist.all_reduce(np.ones(1), group=1), "all_reduce: group must come from "),
        (lambda: dist.barrier(group=[0, 1]), "barrier: group must come from "),
        (lambda: dist.destroy_process_group(3), "destroy_process_group: group must come from "),
        (
            lambda: dist.all_reduce(np.ones(1), op=dist.ReduceOp.BAND),
            "BAND of float64 is not defined: it takes bool, integers of up to 64 bits",
        ),
        (
            lambda: dist.all_reduce(np.ones(1, "M8[s]")),
            r"SUM of datetime64\[s\] is not defined: it takes bool, integers, floats, complex ",
        ),
        (lambda: dist.all_reduce(np.ones(1, np.longdouble)), "SUM of float128 is not defined"),
        (lambda: dist.new_group([0, 7]), "new_group: 7 is not a global rank: the job has ranks 0 "),
        (lambda: dist.new_group([1, 1]), "new_group: rank 1 is listed twice"),
        (dst_without_list, "gather: rank 0 is dst and must pass gather_list as a list of 2 "),
        (src_without_list, "scatter: rank 0 is src and must pass scatter_list as a list of 2 "),
        (source_of_a_send, "Work.source_rank: only receives have a source"),
        (lambda: dist.shrink_group([]), "pass None to exclude only ranks that are dead"),
        (lambda: dist.broadcast(np.ones(1), 5), "rank 5 is not in the default group, whose ranks"),
    ],
    ids=[
        "op", "no op", "group", "list for a group", "destroy", "BAND of floats", "SUM of dates",
        "SUM of long doubles", "unknown rank", "rank twice", "no gather_list", "no scatter_list",
        "source of a send", "none to exclude", "unknown root",
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named_with_its_call(call: Callable[[], object], words: str) -> None:
    """The error comes before any traffic, and the group goes on."""

    def body(rank: int) -> list[float]:
        with pytest.raises((TypeError, ValueError), match=words):
            call()
        x = np.ones(1)
        dist.all_reduce(x)
        return [float(value) for value in x]

    assert [[2.0], [2.0]] == run_threads(body, 2, "inproc")


@pytest.mark.parametrize("description", [None, "tensor parallel"], ids=["default", "described"])
def test_a_group_is_called_what_the_user_calls_it(description: str | None) -> None:
    """The default group, or a group's description, in errors of all ranks."""
    title = "the default group" if description is None else f"group '{description}'"

    def body(rank: int) -> str:
        group = dist.new_group([0, 1], group_desc=description) if description else None
        with pytest.raises(dist.MismatchError) as caught:
            dist.all_reduce(np.ones(3 + rank), group=group)
        return str(caught.value)

    found = run_threads(body, 2, "inproc")
    assert f"all_reduce #1 on {title}: the ranks disagree about the number of elements" in found[0]
    assert f"on {title}: the ranks disagree about the number of elements" in found[1]
    assert "This rank (0): all_reduce #1 of 3 elements. Rank 1: all_reduce #1 of 4" in found[0]
    assert "This rank (1): all_reduce #1 of 4 elements. Rank 0: all_reduce #1 of 3" in found[1]


def test_a_name_is_pickled_as_text() -> None:
    """So that an error which holds it can be read where few types are."""
    error = dist.DistError("why", group=GroupName("1", "trainers"))
    assert type(pickle.loads(pickle.dumps(error)).group) is str


def test_a_group_keeps_its_description() -> None:
    """A part split off it has the one it was given, and a shrunk group that of the group whose
    place it takes: the default group is still called so."""

    def mismatch(group: Any, rank: int) -> str:
        with pytest.raises(dist.MismatchError) as caught:
            dist.all_reduce(np.ones(3 + rank), group=group)
        return str(caught.value)

    def body(rank: int) -> list[str]:
        trainers = dist.new_group([0, 1, 2], group_desc="trainers")
        part = dist.split_group(trainers, [[0, 1]], group_desc="half of them")
        if rank == 2:
            return []
        texts = [mismatch(part, rank)]
        for group in (trainers, None):
            texts.append(mismatch(dist.shrink_group([2], group), rank))
        return texts

    found = run_threads(body, 3, "inproc")
    for texts in found[:2]:
        for text, title in zip(
            texts, ("group 'half of them'", "group 'trainers'", "the default group"), strict=True
        ):
            assert f" on {title}: the ranks disagree" in text


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ("reduce #1 of 4 elements", "reduce #1 of 3 elements", "about the number of elements"),
        ("reduce #1 of 4 elements", "reduce #1 of 1 element", "about the number of elements"),
        ("reduce #1 of float32", "reduce #1 of int8", "about the dtype"),
        ("reduce #1 of 4 float32", "reduce #1 of 3 int8", "the number of elements and the dtype"),
        ("reduce #1, op SUM", "reduce #1, op MAX", "about the operation"),
        ("reduce #1, root 0", "reduce #1, root 1", "about the root"),
        ("reduce #1, algorithm flat", "reduce #1, algorithm tree", "about the algorithm"),
        ("gather #1, all blocks of one size", "gather #1, blocks of any size", "sizes of blocks"),
        ("reduce #1 of 4 float32", "reduce #1 of 4 float32", "about their arguments"),
        ("reduce #1, root 0", "reduce #2, root 0", "the ranks are in different calls"),
        ("reduce #1, root 0", "barrier #1", "the ranks are in different calls"),
    ],
)
def test_what_the_ranks_disagree_about(one: str, other: str, words: str) -> None:
    """The fields that differ, or that the calls do."""
    assert disagreement([one, other]).endswith(words)
