"""Fixtures of the contract tests: the backend, how many ranks, and the job that they make.

A contract test is a body that every rank calls, and what all of them return:

    def test_barrier_returns(job, size):
        def body(rank):
            cydist.barrier()
            return rank

        assert list(range(size)) == job.run(body)

Ranks are threads of one process, or, under a launcher, one process each: every process runs the
same tests in the same order, and sees what all ranks return.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cydist.errors import DistError
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
        """Return a job in good health. Skips the test where a launcher started fewer ranks."""
        job = self._kept.get((backend, size))
        if job is None or job.broken:
            if job is not None:
                job.close()
            job = self._kept[backend, size] = self._made(backend, size)
        return job

    def run_once(self, body: Callable[[int], Any], size: int, backend: str) -> list[Any]:
        """Run a body that may leave its job in any state; what the ranks return."""
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
        """Skip the test where a receive needs a source."""
        if not self.capabilities(backend).any_source:
            pytest.skip(f"{backend} does not receive from any source")

    def _made(self, backend: str, size: int) -> Job:
        if not self.launched:
            return ThreadJob(size, backend)
        if size > self._ranks:
            pytest.skip(f"no more than {self._ranks} ranks, and {size} are needed")
        if self._launched is None:
            self._launched = Launched(backend)
        return self._launched.job(size)

    def end_kept(self) -> None:
        """End the jobs; the next that asks for one gets a new one."""
        kept, self._kept = self._kept, {}
        for job in kept.values():
            job.close()

    def close(self) -> None:
        """End all."""
        self.end_kept()
        if self._launched is not None:
            self._launched.close()


@pytest.fixture(scope="module")
def jobs(session_jobs: Jobs) -> Iterator[Jobs]:
    """Jobs by backend and size, made when first asked for. They end with the module: each holds a
    thread and some descriptors for every rank."""
    yield session_jobs
    session_jobs.end_kept()


@pytest.fixture(scope="session")
def session_jobs(pytestconfig: pytest.Config) -> Iterator[Jobs]:
    """Provide the source of jobs, and what is known of the backends."""
    kept = Jobs()
    yield kept
    if named_by_user(pytestconfig):
        pytestconfig.stash[CAPABILITIES] = {
            name: kept.capabilities(name) for name in pytestconfig.getoption("cydist_backend")
        }
    kept.close()


@pytest.fixture
def backend(chosen_backend: str) -> str:
    """Each backend that --cydist-backend names."""
    return chosen_backend


@pytest.fixture(params=[1, 2, 3, 4], ids=lambda size: f"{size}ranks")
def size(request: pytest.FixtureRequest) -> int:
    """World size."""
    return int(request.param)


@pytest.fixture
def job(jobs: Jobs, backend: str, size: int) -> Job:
    """Return a job on `backend` with `size` ranks; `job.run(body)` calls body(rank) on each."""
    return jobs.get(backend, size)


def pytest_configure(config: pytest.Config) -> None:
    """Under a launcher one rank sums up for all."""
    if launcher_env.placement().rank:
        config.option.reportchars = ""


def pytest_collection_modifyitems(config: pytest.Config) -> None:
    """Refuse to begin where no backend is named, or one that cannot be tested, or too many."""
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
    """Return whether the command line says which backends to test; they are reported on then."""
    return any(arg.startswith("--cydist-backend") for arg in config.invocation_params.args)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say what each backend can do that it need not."""
    if launcher_env.placement().rank:
        return
    for name, found in config.stash.get(CAPABILITIES, {}).items():
        terminalreporter.section(f"cydist backend {name}")
        for line in found.lines():
            terminalreporter.write_line(line)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run what asks for a backend on each that was named."""
    if "chosen_backend" in metafunc.fixturenames:
        names = [name.lower() for name in metafunc.config.getoption("cydist_backend")]
        # An id is a keyword, and other plugins may know a keyword "mpi".
        metafunc.parametrize("chosen_backend", names, ids=[f"on-{name}" for name in names])


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Under a launcher what goes well is told by rank 0, what goes wrong by every rank."""
    if launcher_env.placement().rank and report.passed and report.when == "call":
        return report.outcome, "", ""
    return None
