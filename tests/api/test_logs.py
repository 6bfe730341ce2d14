"""Log lines: what was chosen for each group, what happened on the way, and who asked for it."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from launched_hosts import without_notices

import cydist as dist
from cydist import config, logs
from cydist.testing import run_threads

ROOT = Path(__file__).resolve().parents[2]
NAMES = [*config.LOG.names, *config.TORCH_LOG_LEVEL.names, *config.DEBUG.names]


class Collector(logging.Handler):
    """A program's own handler."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture(autouse=True)
def without_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variable asks for lines, before and after a test."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    yield
    monkeypatch.undo()
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    logs.configure()


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A handler of the program's, for lines of all levels."""
    logger = logging.getLogger("cydist")
    made, before = Collector(), logger.level
    logger.addHandler(made)
    logger.setLevel(logging.DEBUG)
    yield made
    logger.removeHandler(made)
    logger.setLevel(before)


def two_groups(rank: int) -> None:
    x = np.array([float(rank)])
    dist.all_reduce(x)
    pair = dist.new_group([0, 1])
    dist.barrier(pair)


def lines_of(collector: Collector, logger: str, level: int) -> list[tuple[int, str]]:
    """Rank and text of the lines of one logger."""
    return [
        (vars(each)["rank"], each.getMessage())
        for each in collector.records
        if each.name == f"cydist.{logger}" and each.levelno == level
    ]


def test_each_group_is_described_once_on_each_rank(collector: Collector) -> None:
    """At INFO, by the rank that the record carries."""
    run_threads(two_groups, 2, "tcp")
    found = lines_of(collector, "group", logging.INFO)
    assert sorted((rank, text.partition(" of ")[0]) for rank, text in found) == [
        (rank, name) for rank in range(2) for name in ("group '1'", "the default group")
    ]


@pytest.mark.parametrize(
    "words",
    [
        "of ranks 0, 1, backend tcp",
        "transport: tcp",
        f"hosts: {os.uname().nodename} with ranks 0, 1",
        "listens at: 127.0.0.1:",
        "algorithms: the shipped table, CYDIST_ALGORITHM=all_reduce:ring",
        "encryption: off",
        "secret from: the user's own file ",
        "launcher: none",
        "timeout: ",
    ],
)
def test_what_was_chosen(words: str, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of a group has a word on each subject."""
    monkeypatch.setenv("CYDIST_TRANSPORT", "tcp")
    monkeypatch.setenv("CYDIST_ALGORITHM", "all_reduce:ring")
    run_threads(two_groups, 2, "tcp")
    assert all(words in text for _, text in lines_of(collector, "group", logging.INFO))


@pytest.mark.parametrize(
    ("logger", "words"),
    [
        ("rendezvous", r"rank 0 of 2 checks in to meeting 1"),
        ("rendezvous", r"all 2 ranks are here"),
        ("connections", r"connected with rank 1 of the link, interface 0: "),
        ("connections", r"shares no memory: CYDIST_TRANSPORT=tcp"),
        ("group", r"all_reduce #1 on the default group, 8 bytes: algorithm \w+ through messages"),
    ],
)
def test_steps(
    logger: str, words: str, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At DEBUG: steps of the rendezvous, connections, fallbacks with their reason, algorithms. Also
    a thread that serves a rank names that rank."""
    monkeypatch.setenv("CYDIST_TRANSPORT", "tcp")
    run_threads(two_groups, 2, "tcp")
    found = [text for rank, text in lines_of(collector, logger, logging.DEBUG) if rank == 0]
    assert any(re.match(words, text) for text in found), found


def test_own_records_name_the_rank() -> None:
    """Of a program whose handler has the filter `add_rank`."""

    def body(rank: int) -> list[tuple[int, str]]:
        handler = Collector()
        handler.addFilter(dist.add_rank)
        logger = logging.getLogger(f"program.{rank}")
        logger.addHandler(handler)
        logger.error("here")
        return [(vars(each)["rank"], vars(each)["host"]) for each in handler.records]

    host = os.uname().nodename
    assert run_threads(body, 2) == [[(rank, host)] for rank in range(2)]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ("", "")),
        ({"TORCH_CPP_LOG_LEVEL": "ERROR", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, ("", "")),
        ({"TORCH_CPP_LOG_LEVEL": "WARNING", "TORCH_DISTRIBUTED_DEBUG": "INFO"}, ("", "")),
        ({"TORCH_CPP_LOG_LEVEL": "INFO"}, ("INFO", "")),
        ({"TORCH_CPP_LOG_LEVEL": "INFO", "TORCH_DISTRIBUTED_DEBUG": "INFO"}, ("DEBUG", "")),
        ({"TORCH_CPP_LOG_LEVEL": "INFO", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, ("DEBUG", "")),
        ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, ("", "")),
        ({"TORCH_CPP_LOG_LEVEL": "INFO", "CYDIST_LOG": "off"}, ("", "")),
        ({"TORCH_CPP_LOG_LEVEL": "ERROR", "CYDIST_LOG": "Info"}, ("INFO", "")),
        ({"CYDIST_LOG": "debug:/a:b"}, ("DEBUG", "/a:b")),
        ({"CYDIST_LOG": "warning"}, ("WARNING", "")),
    ],
    ids=lambda value: (
        ",".join(value) or "nothing" if isinstance(value, dict) else value[0] or "none"
    ),
)
def test_levels(
    variables: dict[str, str], expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's two variables, as in torch's table, where CYDIST_LOG is not set."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert logs.setting() == expected


@pytest.mark.parametrize("value", ["loud", "debug:", ":/tmp/x", "info,debug"])
def test_wrong_values_are_an_error_before_any_wait(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the variable and its values."""
    monkeypatch.setenv("CYDIST_LOG", value)
    with pytest.raises(ValueError, match=re.escape(f"CYDIST_LOG={value!r}: it must be one of")):
        dist.init_process_group("tcp", rank=0, world_size=2)


def test_a_file_that_cannot_be_opened_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a user does not look for lines that are not written."""
    monkeypatch.setenv("CYDIST_LOG", f"debug:{tmp_path}/none/log")
    with pytest.raises(ValueError, match=r"the file cannot be opened.*No such file"):
        dist.init_process_group("tcp", rank=0, world_size=2)


JOB = """
import numpy, cydist as dist
dist.init_process_group("tcp")
dist.all_reduce(numpy.ones(1))
dist.destroy_process_group()
"""
LINE = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} (INFO|DEBUG) cydist\.\w+, rank (\d) on (\S+) "
    r"\(process (\d+)\): .+"
)


def job(tmp_path: Path, setting: str) -> subprocess.CompletedProcess[str]:
    """A job of two ranks with this CYDIST_LOG."""
    (tmp_path / "job.py").write_text(JOB)
    command = ["-m", "cydist.run", "--nproc-per-node=2", "--no-prefix", str(tmp_path / "job.py")]
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env={**os.environ, "CYDIST_LOG": setting},
        capture_output=True, text=True, timeout=50, check=True,
    )  # fmt: skip


@pytest.mark.parametrize("level", ["info", "debug"])
def test_lines_on_stderr(level: str, tmp_path: Path) -> None:
    """Each is whole, and names level, logger, rank, host and process."""
    lines = job(tmp_path, level).stderr.splitlines()
    found = [match for line in lines if (match := LINE.fullmatch(line))]
    assert len(found) == len(lines)
    assert {match[2] for match in found} == {"0", "1"}
    assert {match[1] for match in found} == ({"INFO"} if level == "info" else {"INFO", "DEBUG"})
    assert {match[3] for match in found} == {os.uname().nodename}


@pytest.mark.parametrize(
    ("name", "files"), [("log", 1), ("log.%h.%p", 2)], ids=["shared", "of-each-process"]
)
def test_lines_in_a_file(name: str, files: int, tmp_path: Path) -> None:
    """Ranks append whole lines to one file, or have one each; only the user can read it."""
    assert without_notices(job(tmp_path, f"debug:{tmp_path}/{name}").stderr) == ""
    written = list(tmp_path.glob("log*"))
    assert len(written) == files
    found = [LINE.fullmatch(line) for file in written for line in file.read_text().splitlines()]
    assert {match and match[2] for match in found} == {"0", "1"}
    assert {file.stat().st_mode & 0o777 for file in written} == {0o600}


def test_cydist_alone_does_not_import_logging() -> None:
    """Nor does a job: it takes a tenth of the time of `import cydist`."""
    program = (
        "import sys, cydist as dist\n"
        "dist.init_process_group('tcp', rank=0, world_size=1)\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
        "print('logging' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=50,
        check=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_nothing_is_shown_unasked(capfd: pytest.CaptureFixture[str]) -> None:
    """Of a program that uses logging, and has no handler."""
    run_threads(two_groups, 2, "tcp")
    assert capfd.readouterr() == ("", "")
