"""Fixtures of the contract tests: the backend, the number of ranks, and the job.

A contract test is a body that every rank calls, and a check of all results:

    def test_barrier_returns(job, size):
        def body(rank):
            cydist.barrier()
            return rank

        assert list(range(size)) == job.run(body)

Ranks are threads of one process or, under a launcher, one process each. Every process then runs the
same tests in the same order, and gets the results of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cydist.errors import DistError, counted
from cydist.groups import registry
from cydist.rendezvous import launcher_env
from cydist.testing import ThreadJob, run_threads
from cydist.testing.capabilities import Capabilities, find
from cydist.testing.launched import Launched, LaunchedJob

CAPABILITIES = pytest.StashKey[dict[str, Capabilities]]()
Job = ThreadJob | LaunchedJob


class Jobs:
    """Jobs that are kept between the tests of a module: (backend, size) -> ranks that wait for a
    body."""

    def __init__(self) -> None:
        self.found: dict[str, Capabilities] = {}
        self._kept: dict[tuple[str, int], Job] = {}
        self._launched: Launched | None = None
        self._ranks = launcher_env.placement().size or 1

    @property
    def launched(self) -> bool:
        """Return whether a launcher started this process as one of several ranks."""
        return self._ranks > 1

    def get(self, backend: str, size: int) -> Job:
        """Return a job that is in order. Skips the test if a launcher started fewer ranks."""
        job = self._kept.get((backend, size))
        if job is None or job.broken:
            if job is not None:
                job.close()
            job = self._kept[backend, size] = self._made(backend, size)
        return job

    def run_once(self, body: Callable[[int], Any], size: int, backend: str) -> list[Any]:
        """Run a body that may leave its job in any state, and return the ranks' results."""
        if not self.launched:
            return run_threads(body, size, backend)
        job = self._made(backend, size)
        try:
            return job.run(body)
        finally:
            job.close()

    def capabilities(self, backend: str) -> Capabilities:
        """Return which optional capabilities the backend has."""
        if backend not in self.found:
            self.found[backend] = find(lambda body: self.run_once(body, 2, backend))
        return self.found[backend]

    def need_any_source(self, backend: str) -> None:
        """Skip the test if the backend cannot receive from any rank."""
        if not self.capabilities(backend).any_source:
            pytest.skip(f"{backend} does not receive from any source")

    def _made(self, backend: str, size: int) -> Job:
        if not self.launched:
            return ThreadJob(size, backend)
        if size > self._ranks:
            pytest.skip(f"no more than {counted(self._ranks, 'rank')}, and {size} are needed")
        if self._launched is None:
            self._launched = Launched(backend)
        return self._launched.job(size)

    def end_kept(self) -> None:
        """End the jobs; the next test gets a new one."""
        kept, self._kept = self._kept, {}
        for job in kept.values():
            job.close()

    def close(self) -> None:
        """End all jobs."""
        self.end_kept()
        if self._launched is not None:
            self._launched.close()


@pytest.fixture(scope="module")
def jobs(session_jobs: Jobs) -> Iterator[Jobs]:
    """Provide jobs by backend and size, made at first use. They end with the module, since each
    holds a thread and some descriptors for every rank."""
    yield session_jobs
    session_jobs.end_kept()


@pytest.fixture(scope="session")
def session_jobs(pytestconfig: pytest.Config) -> Iterator[Jobs]:
    """Provide the source of jobs, and the known capabilities of the backends."""
    kept = Jobs()
    yield kept
    if named_by_user(pytestconfig):
        pytestconfig.stash[CAPABILITIES] = {
            name: kept.capabilities(name) for name in pytestconfig.getoption("cydist_backend")
        }
    kept.close()


@pytest.fixture
def backend(chosen_backend: str) -> str:
    """Provide each backend that --cydist-backend names."""
    return chosen_backend


@pytest.fixture(params=[1, 2, 3, 4], ids=lambda size: f"{size}ranks")
def size(request: pytest.FixtureRequest) -> int:
    """Provide the world size."""
    return int(request.param)


@pytest.fixture
def job(jobs: Jobs, backend: str, size: int) -> Job:
    """Provide a job on `backend` with `size` ranks; `job.run(body)` calls body(rank) on each."""
    return jobs.get(backend, size)


def pytest_configure(config: pytest.Config) -> None:
    """Under a launcher, let one rank print the summary for all."""
    if launcher_env.placement().rank:
        config.option.reportchars = ""


def pytest_collection_modifyitems(config: pytest.Config) -> None:
    """Refuse to start without a backend, with one that cannot be tested, or with too many."""
    names = config.getoption("cydist_backend", default=None)
    why = ""
    if not names:
        why = f"NAME says what to test; there are: {', '.join(registry.names())}"
    elif (launcher_env.placement().size or 1) > 1 and len(names) > 1:
        why = f"{' and '.join(names)}: one at a time where a launcher starts the ranks"
    for name in names or ():
        try:
            devices = registry.parse(name)
        except (ValueError, DistError) as error:
            why = f"{name}: {error}"
        else:
            if "cpu" not in devices:
                why = f"{name}: it takes arrays on {', '.join(devices)}, and the tests' are not"
    if why:
        raise pytest.UsageError(f"--cydist-backend {why}")


def named_by_user(config: pytest.Config) -> bool:
    """Return whether the command line names backends to test; the report then covers them."""
    return any(arg.startswith("--cydist-backend") for arg in config.invocation_params.args)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print each backend's optional capabilities."""
    if launcher_env.placement().rank:
        return
    for name, found in config.stash.get(CAPABILITIES, {}).items():
        terminalreporter.section(f"cydist backend {name}")
        for line in found.lines():
            terminalreporter.write_line(line)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test that takes a backend on each one that was named."""
    if "chosen_backend" in metafunc.fixturenames:
        names = [name.lower() for name in metafunc.config.getoption("cydist_backend")]
        # An id is a keyword, and other plugins may use the keyword "mpi".
        metafunc.parametrize("chosen_backend", names, ids=[f"on-{name}" for name in names])


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Under a launcher, report successes on rank 0 only, and failures on every rank."""
    if launcher_env.placement().rank and report.passed and report.when == "call":
        return report.outcome, "", ""
    return None
