"""Work.get_future: a future of Python that has the methods of torch's."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, InvalidStateError
from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist.testing import run_threads

LIMIT = 20.0


def test_future_of_a_call() -> None:
    """wait, value and then give the arrays, and what callbacks make of them."""

    def body(rank: int) -> list[float]:
        x = np.array([rank + 1.0])
        future = dist.all_reduce(x, async_op=True).get_future()
        halved = future.then(lambda done: done.value()[0] / 2)
        more = halved.then(lambda done: done.wait() + 1)
        assert isinstance(future, Future)
        return [float(future.wait()[0][0]), float(halved.wait()[0]), float(more.result(LIMIT)[0])]

    assert run_threads(body, 2) == [[3.0, 1.5, 2.5]] * 2


@pytest.fixture
def work() -> dist.EventWork:
    """A call under way."""
    return dist.EventWork("copy", result=["x"])


def test_no_value_before_the_end(work: dist.EventWork) -> None:
    """Nor a call of what follows."""
    called: list[Any] = []
    future = work.get_future()
    following = future.then(called.append)
    with pytest.raises(InvalidStateError, match="still under way"):
        future.value()
    assert called == []
    assert not following.done()
    work.end()
    following.result(LIMIT)
    assert called == [future]
    assert future.value() == ["x"]


def test_the_calls_error_reaches_what_follows(work: dist.EventWork) -> None:
    """It is raised where a callback asks for the value, and by the future of that callback."""
    following = work.get_future().then(lambda done: done.value())
    work.end(dist.DistNetworkError("cut"))
    with pytest.raises(dist.DistNetworkError, match="cut"):
        following.result(LIMIT)


def test_a_callbacks_error_is_its_futures(work: dist.EventWork) -> None:
    """The call's own future keeps the result."""
    future = work.get_future()
    following = future.then(lambda done: 1 // 0)
    work.end()
    with pytest.raises(ZeroDivisionError):
        following.result(LIMIT)
    assert future.result(LIMIT) == ["x"]


def test_after_the_end_a_callback_runs_at_once(work: dist.EventWork) -> None:
    work.end()
    assert work.get_future().then(lambda done: 7).value() == 7


def test_what_follows_can_be_awaited(work: dist.EventWork) -> None:
    """As every future of Python can, by asyncio.wrap_future."""

    async def main() -> object:
        return await asyncio.wrap_future(work.get_future().then(lambda done: done.value()))

    work.end()
    assert asyncio.run(main()) == ["x"]
