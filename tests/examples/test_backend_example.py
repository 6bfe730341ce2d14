"""docs/examples/backend: what the tutorial ends with installs, and keeps every contract."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from extra_values import more

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs/examples/backend"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install")
OFFLINE = ("--no-build-isolation", "--no-deps", "--no-index")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def install(source: Path, site: Path) -> None:
    """`pip install`, without a network."""
    command = [*PIP, *OFFLINE, "--target", str(site), str(source)]
    subprocess.run(command, check=True, timeout=120)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the example is installed."""
    folder = tmp_path_factory.mktemp("example")
    install(Path(shutil.copytree(EXAMPLE, folder / "source")), folder / "site")
    with_cydist(folder / "site")
    return folder / "site"


def with_cydist(site: Path) -> None:
    """Put cydist beside it, away from this project's conftest.py."""
    for name in ("cydist", "_cydist_pytest.py"):
        (site / name).symlink_to(ROOT / name)


def python(site: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, with what is installed in `site`."""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True,
        timeout=280, check=False,
    )  # fmt: skip


def contract(site: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run contract tests on the example as its author would."""
    suite = ("-p", "_cydist_pytest", "--pyargs", "cydist.testing", "--cydist-backend", "unix")
    return python(site, cwd, "-m", "pytest", "-q", *suite, *arguments)


def test_it_is_short() -> None:
    """A working backend has fewer than 100 lines."""
    assert len((EXAMPLE / "cydist_unix.py").read_text().splitlines()) < 100


def test_the_tutorial_shows_it() -> None:
    """Every line of code in the tutorial is a line of the example."""
    tutorial = (ROOT / "docs/dev/backend.md").read_text()
    blocks = re.findall(r"```(python|toml)\n(.*?)```", tutorial, re.S)
    assert ["python", "python", "python", "toml"] == [kind for kind, _ in blocks]
    for kind, block in blocks:
        file = {"python": "cydist_unix.py", "toml": "pyproject.toml"}[kind]
        lines = [
            line.partition("  #")[0].strip() for line in (EXAMPLE / file).read_text().splitlines()
        ]
        shown = [line.partition("  #")[0].strip() for line in block.splitlines()]
        assert [line for line in shown if line not in lines] == []


@pytest.mark.parametrize("left_out", ["1ranks or 2ranks or 4ranks", *more("nothing")])
def test_it_keeps_every_contract(site: Path, tmp_path: Path, left_out: str) -> None:
    """All contract tests pass, and the report says what the backend can do and what it cannot."""
    ended = contract(site, tmp_path, "-k", f"not ({left_out})")
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr
    said = [line.split() for line in ended.stdout.splitlines()]
    assert ["receives", "from", "any", "source", "no"] in said
    assert ["collectives", "of", "its", "own", "none"] in said
    assert ["asynchronous", "collectives", "yes"] in said


PROGRAM = """
import sys
import numpy, cydist
cydist.init_process_group("unix", timeout=30)
x = numpy.arange(3.0) + cydist.get_rank()
cydist.all_reduce(x)
print(cydist.get_backend(), x.tolist())
if cydist.get_rank() == 1:
    sys.exit()
try:
    cydist.recv(x, 1)
except cydist.PeerFailedError as error:
    print(error)
"""


def test_ranks_are_processes(site: Path, tmp_path: Path) -> None:
    """Under cydistrun, where a rank that has left is noticed by the other."""
    (tmp_path / "program.py").write_text(PROGRAM)
    launch = ("-m", "cydist.run", "--nproc-per-node", "2", "program.py")
    ended = python(site, tmp_path, *launch)
    assert ended.returncode == 0, ended.stderr
    said = sorted(ended.stdout.splitlines())
    assert [
        "[0] rank 1 ended or was lost",
        "[0] unix [1.0, 3.0, 5.0]",
        "[1] unix [1.0, 3.0, 5.0]",
    ] == [line.partition(":")[0] for line in said]


TAGLESS = "peer, tag):\n        tag = min(tag, 0)\n"
BROKEN = {
    "order": ({"arrived.popleft()": "arrived.pop()"}, "messages_of_one_tag_keep_their_order"),
    "tags": ({"peer, tag):\n": TAGLESS}, "tags_tell_messages_apart"),
    "size": (
        {"!= array.nbytes": "< array.nbytes", "[:] = content": "[:] = content[: array.nbytes]"},
        "a_message_of_another_size_is_refused",
    ),
    "source": ({"end(source=self.ranks[peer])": "end(source=self.rank())"}, "send_and_recv"),
}


@pytest.mark.parametrize(("changes", "test"), BROKEN.values(), ids=BROKEN)
def test_a_broken_backend_fails(
    site: Path, tmp_path: Path, changes: dict[str, str], test: str
) -> None:
    """A rank that gets a rule wrong learns which."""
    text = (EXAMPLE / "cydist_unix.py").read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    broken = Path(shutil.copytree(site, tmp_path / "site", symlinks=True))
    (broken / "cydist_unix.py").write_text(text)
    ended = contract(broken, tmp_path, "-k", test)
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED, ended.stdout[-2000:] + ended.stderr
    assert re.search(rf"^FAILED .*{test}", ended.stdout, re.M)


def test_a_version_that_does_not_fit(site: Path, tmp_path: Path) -> None:
    """The example for a later interface is refused by who names it, with what to do."""
    source = Path(shutil.copytree(EXAMPLE, tmp_path / "source"))
    module = source / "cydist_unix.py"
    text = module.read_text()
    assert text.count("interface_version = 2") == 1
    module.write_text(text.replace("interface_version = 2", "interface_version = 3"))
    install(source, tmp_path / "site")
    with_cydist(tmp_path / "site")
    program = "import cydist; cydist.init_process_group('unix')"
    ended = python(tmp_path / "site", tmp_path, "-c", program)
    expected = "'unix' (cydist_unix.UnixGroup) was written for version 3 of cydist's interface"
    assert expected in ended.stderr
    assert "install a later release of cydist" in ended.stderr


def test_an_unknown_backend(site: Path, tmp_path: Path) -> None:
    """pytest names the backends that there are."""
    ended = contract(site, tmp_path, "--cydist-backend", "unicks")
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--cydist-backend unicks: no backend is called 'unicks'; there are: " in ended.stderr
    assert "tcp, unix" in ended.stderr


def test_no_backend(site: Path, tmp_path: Path) -> None:
    """pytest says how to name one."""
    ended = python(
        site, tmp_path, "-m", "pytest", "-p", "_cydist_pytest", "--pyargs", "cydist.testing"
    )
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--cydist-backend NAME says what to test; there are: " in ended.stderr
