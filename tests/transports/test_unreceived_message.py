"""A large message that nobody asks for: it is not taken for sent, on our own transports."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist.testing.test_timeouts import TIMEOUT, late, waited_for

LONG = 300_000  # elements: too many to be sent before they are asked for


def isend(group: Any) -> Any:
    return dist.isend(np.ones(LONG), 1, group)


CASES = {
    "timeout of the call": (
        lambda group: dist.send(np.ones(LONG), 1, group, timeout=TIMEOUT),
        None,
    ),
    "timeout of the group": (lambda group: dist.send(np.ones(LONG), 1, group), TIMEOUT),
    "timeout of the wait": (lambda group: waited_for(isend(group)), None),
    "group's, once started": (lambda group: isend(group).wait(), TIMEOUT),
}


@pytest.mark.parametrize("transport", ["inproc", "tcp", "shm", "derived"])
@pytest.mark.parametrize(("call", "limit"), CASES.values(), ids=CASES)
def test_an_unreceived_message_times_out(
    jobs: Any, transport: str, call: Any, limit: float | None
) -> None:
    """Sending ends when its timeout has passed, wherever that comes from."""
    late(jobs, transport, call, limit)
