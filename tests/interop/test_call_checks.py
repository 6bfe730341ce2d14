"""CYDIST_DEBUG=DETAIL and CYDIST_CHECK_NAN=1 in groups of torch's backend "cydist"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

import cydist

torch = pytest.importorskip("torch")

if TYPE_CHECKING:
    from torch_thread_job import Job


@pytest.fixture
def checked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """Two ranks whose groups get the checks of the variable that the test names."""
    from torch_thread_job import Job

    monkeypatch.setenv(*request.param)
    job = Job(2)
    yield job
    job.close()


def errors(job: Job, call: Callable[[Any], Any], kind: type[Exception]) -> list[str]:
    """Make a call that fails on both ranks, and then one that works; the messages."""

    def body(group: Any) -> str:
        with pytest.raises(kind) as caught:
            call(group).wait()
        x = torch.ones(3)
        group.allreduce([x]).wait()
        assert x.tolist() == [2.0] * 3
        return str(caught.value)

    return job.run(body)


DIFFERENT: dict[str, tuple[Callable[[Any], Any], str]] = {
    "size": (
        lambda group: group.allreduce([torch.ones(3 + group.rank())]),
        "Rank 0: all_reduce #1 of (3,) at test_call_checks.py:",
    ),
    "shape": (
        lambda group: group.allreduce([torch.ones((2, 3) if group.rank() else (3, 2))]),
        "Rank 1: all_reduce #1 of (2, 3) at test_call_checks.py:",
    ),
    "dtype": (
        lambda group: group.broadcast([torch.ones(3).to([torch.int64, torch.int32][group.rank()])]),
        "Rank 1: broadcast #1 of int32 on cpu at test_call_checks.py:",
    ),
    "call": (
        lambda group: group.barrier() if group.rank() else group.allreduce([torch.ones(3)]),
        "Rank 1: barrier #1 at test_call_checks.py:",
    ),
}


@pytest.mark.parametrize(
    "checked",
    [("CYDIST_DEBUG", "DETAIL"), ("TORCH_DISTRIBUTED_DEBUG", "DETAIL")],
    ids=["CYDIST_DEBUG", "TORCH_DISTRIBUTED_DEBUG"],
    indirect=True,
)
@pytest.mark.parametrize("name", DIFFERENT)
def test_calls_are_compared_before_they_run(checked: Job, name: str) -> None:
    """A difference is an error on both ranks, with the program's lines; the group goes on."""
    call, words = DIFFERENT[name]
    for text in errors(checked, call, cydist.MismatchError):
        assert words in text
        assert "Nothing was sent, and the group goes on" in text


@pytest.mark.parametrize("checked", [("CYDIST_CHECK_NAN", "1")], ids=["nan"], indirect=True)
def test_inputs_are_searched(checked: Job) -> None:
    """Both ranks learn which rank, call and element it is; the group goes on."""

    def call(group: Any) -> Any:
        x = torch.ones(2, 3, dtype=torch.bfloat16)
        x[1, 2] = float("inf") if group.rank() == 1 else 1
        return group.allreduce([x])

    for text in errors(checked, call, cydist.NonFiniteError):
        assert "all_reduce #1 on the default group: rank 1's input has inf at index (1, 2)" in text
