"""What holds for every test: one thread for BLAS, and no skip goes unnoticed in CI."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# How hard hypothesis tries: the same examples every time, for seconds; or others each time, for
# minutes (scripts/test-heavy).
slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("seconds", derandomize=True, deadline=None, database=None)
settings.register_profile("minutes", max_examples=3000, deadline=None, suppress_health_check=slow)
settings.load_profile("seconds")

# Ranks share few cores; set before numpy is imported, and inherited by every rank.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# Algorithms are chosen as shipped, whatever was measured on this machine.
os.environ["CYDIST_TUNING"] = "off"

UNDER_MPIRUN = "PMI_RANK" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ

# These run on every rank of an mpirun, see scripts/test-mpi.
collect_ignore = [] if UNDER_MPIRUN else ["tests/backends/mpi"]

# Contract tests of these are repeated on worlds of these sizes in scripts/test-all.
MORE_BACKENDS, MORE_SIZES = ("inproc", "shm", "derived"), (1, 4)

# Reasons for which a test may be skipped in CI: what a machine may lack through no fault of
# the environment that scripts/test makes.
EXCUSED = (
    "no IPv6",
    "no route to ",
    "no AVX2",
    "no AVX-512",
    "no CUDA device",
)


@pytest.hookimpl(tryfirst=True)  # the contract tests look at the option too
def pytest_configure(config: pytest.Config) -> None:
    """Contract tests run on every backend that can have threads as ranks, if not told otherwise."""
    from cydist._native import Array
    from cydist.backends.host import create as host_backend
    from cydist.groups import registry
    from cydist.groups.process_group import ProcessGroup
    from cydist.work import Work

    class Derived(ProcessGroup):
        """A third party's first day: two methods, everything else derived."""

        def __init__(self, options: registry.BackendOptions, pg_options: object) -> None:
            super().__init__(options.group_rank, options.group_size)
            self._inner = host_backend.create_inproc(options)

        def isend(self, array: Array, peer: int, tag: int) -> Work:
            return self._inner.isend(array, peer, tag)

        def irecv(self, array: Array, peer: int | None, tag: int) -> Work:
            return self._inner.irecv(array, peer, tag)

        def close(self) -> None:
            self._inner.destroy()

    registry.register_backend("shm", host_backend.create, extended_api=True, devices="cpu")
    registry.register_backend("derived", Derived, extended_api=True, devices="cpu")
    if not (config.option.cydist_backend or UNDER_MPIRUN):
        config.option.cydist_backend = ["inproc", "tcp", "shm", "derived"]
    if config.option.cydist_backend:
        config.pluginmanager.import_plugin("cydist.testing.contract")


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where files are shared out among processes, those with slow tests come first. Contract tests
    with one and with four ranks are marked `more` but over sockets, and so are variants of the
    kernels that this machine cannot run."""
    from cydist._native import kernels

    cannot_run = set(VARIANTS) - set(kernels.isas())
    for item in items:
        callspec = getattr(item, "callspec", None)
        values = {} if callspec is None else callspec.params
        repeated = (
            values.get("chosen_backend") in MORE_BACKENDS and values.get("size") in MORE_SIZES
        )
        if repeated or values.get("isa") in cannot_run:
            item.add_marker(pytest.mark.more)
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)


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


# How the kernels' variants are called in EXCUSED.
VARIANTS = {
    "baseline": "baseline",
    "avx2": "AVX2",
    "avx512": "AVX-512",
    "avx512bf16": "AVX-512 with BF16",
    "avx512fp16": "AVX-512 with FP16",
}


@pytest.fixture(params=VARIANTS)
def isa(request: pytest.FixtureRequest) -> Generator[str, None, None]:
    """Each variant of the kernels, in use while the test runs."""
    from cydist._native import kernels

    if request.param not in kernels.isas():
        pytest.skip(f"no {VARIANTS[request.param]}")
    kernels.use_isa(request.param)
    yield request.param
    kernels.use_isa()


@pytest.fixture(autouse=True)
def transport_by_name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test on "tcp" means sockets, one on "shm" the same backend with shared memory."""
    callspec = getattr(request.node, "callspec", None)
    values = () if callspec is None else callspec.params.values()
    named = [value for value in values if isinstance(value, str) and value in ("tcp", "shm")]
    if named:
        monkeypatch.setenv("CYDIST_TRANSPORT", named[0])


@pytest.fixture
def secret() -> Generator[bytes, None, None]:
    """One secret for this process, and for others that are given it: bytes(range(32))."""
    from cydist.net import auth

    value = bytes(range(auth.SECRET_BYTES))
    auth.forget_secret()
    auth.set_secret(value)
    yield value
    auth.forget_secret()


@pytest.fixture
def master(secret: bytes) -> Generator[Any, None, None]:
    """A TCPStore on 127.0.0.1 that this process serves, on any port."""
    from cydist.stores import TCPStore

    store = TCPStore("127.0.0.1", 0, None, True, 30)
    yield store
    store.close()


@pytest.fixture(params=["store", "peer"])
def service(request: pytest.FixtureRequest) -> Generator[Any, None, None]:
    """Every kind of port that a job listens on, as job_ports.Service."""
    import job_ports

    make = {"store": job_ports.store_service, "peer": job_ports.peer_service}[request.param]
    with make() as service:
        yield service
