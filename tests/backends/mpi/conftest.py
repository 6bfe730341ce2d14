"""The same tests on every rank of an mpirun, in one order. Every test has a group of its own,
so one that fails on some rank does not spoil the next.
"""

import pytest

import cydist as dist
from cydist.rendezvous.launcher_env import placement

# One rank sends to nobody, and agrees with itself.
collect_ignore = (
    [
        "test_cuda_aware.py",
        "test_messages.py",
        "test_failures.py",
        "test_group_departure.py",
        "test_mpi_errors.py",
        "test_length_mismatch.py",
    ]
    if placement().size == 1
    else []
) + (["test_pairwise.py"] if placement().size != 2 else [])

LIMIT = 20.0  # seconds; a rank that failed leaves the others waiting for so long


def pytest_sessionstart(session):
    """Join the job once; nothing but mpirun says who this rank is."""
    dist.init_process_group(timeout=LIMIT)


def pytest_sessionfinish(session, exitstatus):
    """Leave the job."""
    dist.destroy_process_group()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A failure names the rank that it happened on."""
    report = yield
    if report.failed:
        report.sections.insert(0, ("rank", f"{dist.get_rank()} of {dist.get_world_size()}"))
    return report


def pytest_report_teststatus(report):
    """Dots of rank 0 only; failures of every rank."""
    loud = not report.passed or report.when != "call"
    if not loud and dist.is_initialized() and dist.get_rank() > 0:
        return report.outcome, "", ""
    return None


@pytest.fixture
def rank():
    """This process."""
    return dist.get_rank()


@pytest.fixture
def size():
    """How many there are."""
    return dist.get_world_size()


@pytest.fixture
def group():
    """A group of all ranks for one test."""
    made = dist.new_group()
    yield made
    dist.destroy_process_group(made)


@pytest.fixture
def spare():
    """Another one, for where the first is meant to fail."""
    made = dist.new_group()
    yield made
    dist.destroy_process_group(made)
