"""What pytest learns from an installed cydist: a fixture for ranks that are threads, and the option
of the contract tests.

pytest loads this module wherever cydist is installed, so it imports cydist only when asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from cydist.testing import ThreadJob


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take --cydist-backend."""
    parser.getgroup("cydist").addoption(
        "--cydist-backend",
        action="append",
        default=[],
        metavar="NAME",
        help="a backend to run the contract tests of cydist.testing on; may be repeated",
    )


@pytest.fixture
def thread_job() -> Iterator[Callable[..., ThreadJob]]:
    """Make jobs whose ranks are threads: `thread_job(3).run(body)` calls body(rank) on each.

    Takes what cydist.testing.ThreadJob takes; the jobs end with the test.
    """
    from cydist.testing import ThreadJob

    with ExitStack() as jobs:

        def start(size: int, *args: Any, **options: Any) -> ThreadJob:
            return jobs.enter_context(ThreadJob(size, *args, **options))

        yield start
