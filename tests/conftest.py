"""What holds for every test: one thread for BLAS, and no skip goes unnoticed in CI."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest

# Ranks share few cores; set before numpy is imported, and inherited by every rank.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

UNDER_MPIRUN = "PMI_RANK" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ

# These run on every rank of an mpirun, see scripts/test-mpi.
collect_ignore = [] if UNDER_MPIRUN else ["mpi"]

# Reasons for which a test may be skipped in CI: what a machine may lack through no fault of
# the environment that scripts/test makes.
EXCUSED = (
    "no IPv6",
    "no AVX2",
    "no AVX-512",
    "no CUDA device",
)


def unexcused(reason: str) -> bool:
    """Is this skip a hole in CI?"""
    return bool(os.environ.get("CI")) and not reason.removeprefix("Skipped: ").startswith(EXCUSED)


def refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Make a skipped report a failed one, unless its reason is excused."""
    if not report.skipped or hasattr(report, "wasxfail") or not isinstance(report.longrepr, tuple):
        return
    path, line, reason = report.longrepr
    if unexcused(reason):
        report.outcome = "failed"
        report.longrepr = f"{Path(path).name}:{line}: skipped in CI: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    refuse_skip(report)
    return report
