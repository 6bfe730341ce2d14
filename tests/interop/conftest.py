"""Jobs of torch groups, for the tests here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from torch_thread_job import Job


@pytest.fixture(scope="module", params=[1, 2, 3], ids="{} ranks".format)
def shared(request: pytest.FixtureRequest) -> Iterator[Job]:
    """A job that tests use in turn and leave whole."""
    from torch_thread_job import Job

    job = Job(request.param)
    yield job
    job.close()


@pytest.fixture
def pair() -> Iterator[Job]:
    """Two ranks for a test that breaks their group."""
    from torch_thread_job import Job

    job = Job(2)
    yield job
    job.close()
