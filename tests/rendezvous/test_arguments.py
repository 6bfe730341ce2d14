"""What rendezvous refuses before it meets anybody."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cydist.errors import DistError
from cydist.net import auth
from cydist.rendezvous import handlers, launcher_env
from cydist.stores import HashStore


@pytest.fixture(autouse=True, scope="module")
def by_hand() -> Iterator[None]:
    """No launcher says who we are, and no file of the user is made."""
    with pytest.MonkeyPatch.context() as patch:
        for each in launcher_env.LAUNCHERS:
            for name in each.rank + each.size:
                patch.delenv(name, raising=False)
        auth.forget_secret()
        auth.set_secret(auth.new_secret())
        yield
    auth.forget_secret()


@pytest.mark.parametrize(
    ("method", "rank", "size", "says"),
    [
        ("tcp://127.0.0.1:1?rank=0", 0, 1, "rank is given twice"),
        ("tcp://127.0.0.1:1?world_size=2", 0, 1, "world_size is given twice"),
        ("tcp://127.0.0.1:1?rank=x", -1, 1, "number"),
        ("tcp://127.0.0.1:1?rang=1", -1, 1, "unknown 'rang'"),
        ("tcp://127.0.0.1", 0, 1, "port"),
        ("tcp://127.0.0.1:99999", 0, 1, "ort"),
        ("tcp://:5", 0, 1, "host"),
        ("tcp://127.0.0.1:1", -1, 2, r"rank \(RANK\)"),
        ("tcp://127.0.0.1:1", 2, 2, "from 0 to 1"),
        ("tcp://239.1.1.1:5", 0, -1, "world_size"),
        ("file:///tmp/x", 0, -1, "world_size"),
        ("file:///tmp/x", 5, 2, "from 0 to 1"),
        ("file://tmp/x", 0, 1, "third slash"),
        ("file://", 0, 1, "path"),
        ("env://", -1, -1, "RANK"),
        ("http://127.0.0.1:1", 0, 1, "must begin with"),
        ("tcp://127.0.0.1:1", 0, 10**10, "world_size.*at most 1048576"),
        ("file:///tmp/x", -1, 10**10, "world_size.*at most 1048576"),
    ],
)
def test_bad_arguments_are_refused(method: str, rank: int, size: int, says: str) -> None:
    """What is missing, unknown or given twice is a ValueError that names it."""
    with pytest.raises(ValueError, match=says):
        handlers.rendezvous(method, rank=rank, world_size=size, timeout=0)


def test_store_and_url_exclude_each_other() -> None:
    """Two ways to meet are one too many; a store needs rank and size."""
    with pytest.raises(ValueError, match="not both"):
        handlers.rendezvous("env://", rank=0, world_size=1, store=HashStore())
    with pytest.raises(ValueError, match="world_size"):
        handlers.rendezvous(rank=0, store=HashStore())


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_no_url_crashes_the_parser(text: str) -> None:
    """Any text for an URL is a ValueError or a typed error, and quickly."""
    with pytest.raises((ValueError, DistError)):
        handlers.rendezvous("tcp://" + text, rank=1, world_size=2, timeout=0)
