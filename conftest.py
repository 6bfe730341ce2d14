"""Configuration of all tests: BLAS uses one thread, and CI fails on unexcused skips."""

from __future__ import annotations

import gc
import os
import sys
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Hypothesis runs the same examples every time, for seconds, or new ones each time, for minutes
# (scripts/test-heavy).
slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("seconds", derandomize=True, deadline=None, database=None)
settings.register_profile("minutes", max_examples=3000, deadline=None, suppress_health_check=slow)
settings.load_profile("seconds")

# Ranks share few cores. This is set before numpy is imported, and every rank inherits it.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# Choose algorithms as shipped, and ignore this machine's tuning file.
os.environ["CYDIST_TUNING"] = "off"

UNDER_MPIRUN = "PMI_RANK" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ

# These run on every rank of an mpirun, see scripts/test-mpi.
collect_ignore = [] if UNDER_MPIRUN else ["tests/backends/mpi"]

# Contract tests of these are repeated on worlds of these sizes in scripts/test-all. Those over
# sockets run on all sizes in scripts/test.
MORE_SIZES = {"inproc": (1, 2, 4), "shm": (1, 4), "derived": (1, 2, 4)}

# Reasons for which a test may be skipped in CI: features that a machine may lack even in the
# environment of scripts/test.
EXCUSED = (
    "no IPv6",
    "no route to ",
    "no AVX2",
    "no AVX-512",
    "no CUDA device",
    "no network namespaces",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let CI share a long list of tests among its runs."""
    parser.addoption(
        "--third", type=int, choices=range(3), help="run the tests of a third of all files: 0, 1, 2"
    )


@pytest.hookimpl(tryfirst=True)  # the contract tests read the option too
def pytest_configure(config: pytest.Config) -> None:
    """Run contract tests by default on every backend whose ranks can be threads."""
    from cydist._native import Array
    from cydist.backends.host import create as host_backend
    from cydist.groups import registry
    from cydist.groups.process_group import ProcessGroup
    from cydist.work import Work

    gc.disable()  # until the tests are collected

    class Derived(ProcessGroup):
        """A third party's minimal backend: two methods, everything else derived."""

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


@pytest.hookimpl(tryfirst=True)  # before pytest evaluates the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the files with slow tests first if files are distributed among processes. Keep those of
    a third of the files if --third asks for it. Mark contract tests on MORE_SIZES as `more`, and
    also most of those with CYDIST_DEBUG=DETAIL, and variants of the kernels that this machine
    cannot run."""
    from cydist._native import kernels

    cannot_run = set(VARIANTS) - set(kernels.isas())
    for item in items:
        callspec = getattr(item, "callspec", None)
        values = {} if callspec is None else callspec.params
        backend = values.get("chosen_backend", "")
        repeated = values.get("size") in MORE_SIZES.get(backend, ())
        # Mismatches that are found before the calls run: with threads on two ranks of two backends.
        if values.get("level") == "detail" and not UNDER_MPIRUN:
            repeated = values.get("p", 2) != 2 or backend in ("shm", "derived")
        if repeated or values.get("isa") in cannot_run:
            item.add_marker(pytest.mark.more)
    third = config.getoption("--third")
    if third is not None:
        parts: list[list[pytest.Item]] = [[], [], []]
        for item in items:
            parts[zlib.crc32(item.location[0].encode()) % 3].append(item)
        items[:] = parts.pop(third)
        config.hook.pytest_deselected(items=[*parts[0], *parts[1]])
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Let no garbage collection look through the thousands of tests, which all stay. Each would
    take longer than most tests do, and some tests collect again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


def unexcused(reason: str) -> bool:
    """Return whether CI must not accept this skip."""
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


# Names of the kernels' variants in EXCUSED.
VARIANTS = {
    "baseline": "baseline",
    "avx2": "AVX2",
    "avx512": "AVX-512",
    "avx512bf16": "AVX-512 with BF16",
    "avx512fp16": "AVX-512 with FP16",
}


@pytest.fixture(params=VARIANTS)
def isa(request: pytest.FixtureRequest) -> Generator[str, None, None]:
    """Use each variant of the kernels during the test."""
    from cydist._native import kernels

    if request.param not in kernels.isas():
        pytest.skip(f"no {VARIANTS[request.param]}")
    kernels.use_isa(request.param)
    yield request.param
    kernels.use_isa()


@pytest.fixture(autouse=True)
def transport_by_name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use sockets for tests on "tcp", encrypted ones for tests on "tls", and the same backend with
    shared memory for tests on "shm"."""
    callspec = getattr(request.node, "callspec", None)
    values = () if callspec is None else callspec.params.values()
    named = [value for value in values if isinstance(value, str) and value in ("tcp", "tls", "shm")]
    if named:
        monkeypatch.setenv("CYDIST_TRANSPORT", named[0].replace("tls", "tcp"))
    if "tls" in named:
        monkeypatch.setenv("CYDIST_ENCRYPT", "1")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, None, None]:
    """Let no test choose algorithms in the next one: settings and tuning files are cached."""
    yield  # pytest.MonkeyPatch takes settings back
    table = sys.modules.get("cydist.tuning.table")
    if table is not None:
        table.use_rules({}, {})
        table.reload()


@pytest.fixture
def secret() -> Generator[bytes, None, None]:
    """Set one secret for this process, and for others that receive it: bytes(range(32))."""
    from cydist.net import auth

    value = bytes(range(auth.SECRET_BYTES))
    auth.forget_secret()
    auth.set_secret(value)
    yield value
    auth.forget_secret()


@pytest.fixture
def master(secret: bytes) -> Generator[Any, None, None]:
    """Provide a TCPStore on 127.0.0.1 that this process serves, on any port."""
    from cydist.stores import TCPStore

    store = TCPStore("127.0.0.1", 0, None, True, 30)
    yield store
    store.close()


@pytest.fixture(params=["store", "peer"])
def service(request: pytest.FixtureRequest) -> Generator[Any, None, None]:
    """Provide every kind of port that a job listens on, as job_ports.Service."""
    import job_ports

    make = {"store": job_ports.store_service, "peer": job_ports.peer_service}[request.param]
    with make() as service:
        yield service


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Generator[Any, None, None]:
    """Provide a Slurm on two hosts, as slurm_cluster.Cluster."""
    from slurm_cluster import slurm_cluster, why_no_slurm

    if why_no_slurm():
        pytest.skip(why_no_slurm())
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Generator[list[Any], None, None]:
    """Four hosts on one switch: namespaces of this machine, of network_hosts.py."""
    from network_hosts import network_of, require_hosts

    require_hosts()
    with network_of(4, tmp_path_factory.mktemp("hosts")) as (_, made):
        yield made
