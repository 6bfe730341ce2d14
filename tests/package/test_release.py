"""scripts/release refuses what is not ready, and releases nothing itself."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 20.0
STATED = ("CHANGELOG.md", "CITATION.cff", "cydist/config.py", "pyproject.toml")
STEPS = ("docs", "wheels", "test-wheel", "test", "test-all")
BUILD = ["cydist-0.9.0.tar.gz"] + [
    f"cydist-0.9.0-cp3{minor}-cp3{minor}-manylinux_2_28_{platform.machine()}.whl"
    for minor in (11, 12, 13)
]


class Repository:
    """A repository whose files state version 0.9.0, released today, with stand-ins for scripts."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for path in (*STATED, "scripts/release"):
            (root / path).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / path, root / path)
        self.replace("cydist/config.py", r'^__version__ = ".*"', '__version__ = "0.9.0"')
        today = date.today()
        self.replace("CHANGELOG.md", r"^## (?s:.*)", f"## 0.9.0 ({today})\n\n### Added\n\n- All.\n")
        self.replace("CITATION.cff", r"^(version|date-released): .*\n", "")
        self.replace("CITATION.cff", r"\Z", f"version: 0.9.0\ndate-released: {today}\n")
        for step in STEPS:
            self.stand_in(step)
        self.stand_in("wheels", 'mkdir -p "$1" && cd "$1" && touch ' + " ".join(BUILD))
        self.write(".gitignore", "/dist/\n/steps\n")
        self.git("init", "--quiet")
        self.commit()

    def git(self, *arguments: str) -> str:
        who = ["-c", "user.name=someone", "-c", "user.email=someone@example.org"]
        return subprocess.run(
            ["git", *who, *arguments], cwd=self.root, capture_output=True, text=True,
            timeout=DEADLINE, check=True,
        ).stdout  # fmt: skip

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", "Change")

    def write(self, path: str, content: str) -> None:
        (self.root / path).write_text(content)

    def replace(self, path: str, pattern: str, by: str) -> None:
        """Replace the only match of a pattern."""
        old = (self.root / path).read_text()
        new, count = re.subn(pattern, by, old, flags=re.M)
        assert count > 0 or "date-released" in pattern
        self.write(path, new)

    def stand_in(self, step: str, body: str = "") -> None:
        """Make a script that notes that it ran, and whether a skipped test fails there."""
        path = self.root / "scripts" / step
        path.write_text(f'#!/bin/sh\necho "{step} $CI" >>steps\n{body}\n')
        path.chmod(0o755)

    def release(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.root / "scripts/release", *arguments], capture_output=True, text=True,
            timeout=DEADLINE, check=False,
        )  # fmt: skip

    def steps(self) -> list[str]:
        """The scripts that ran."""
        ran = self.root / "steps"
        return ran.read_text().splitlines() if ran.exists() else []


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_it_says_what_it_would_tag(repository: Repository) -> None:
    """After all scripts, in an order in which the short ones come first; it makes no tag."""
    done = repository.release()
    assert done.returncode == 0, done.stderr
    head = repository.git("rev-parse", "HEAD").strip()
    assert f"git tag --annotate v0.9.0 --message 'cydist 0.9.0' {head}" in done.stdout
    assert repository.steps() == [f"{step} true" for step in STEPS]
    assert repository.git("tag") == ""


def test_files_only(repository: Repository) -> None:
    """With --files no script runs."""
    assert repository.release("--files").returncode == 0
    assert repository.steps() == []


def change_a_file(repository: Repository) -> None:
    repository.write("LICENSE", "mine")


def cite_another_version(repository: Repository) -> None:
    repository.replace("CITATION.cff", "^version: .*", "version: 0.8.0")
    repository.commit()


def cite_another_day(repository: Repository) -> None:
    repository.replace("CITATION.cff", "^date-released: .*", "date-released: 2001-01-01")
    repository.commit()


def state_another_version(repository: Repository) -> None:
    repository.replace("cydist/config.py", '^__version__ = ".*"', '__version__ = "0.9.1"')
    repository.commit()


def state_no_version(repository: Repository) -> None:
    repository.replace("cydist/config.py", '^__version__ = ".*"', '__version__ = "soon"')
    repository.commit()


def state_it_twice(repository: Repository) -> None:
    repository.replace("pyproject.toml", "^dynamic = .*", 'version = "0.9.0"')
    repository.commit()


def write_no_date(repository: Repository) -> None:
    repository.replace("CHANGELOG.md", "^## .*", "## 0.9.0 (unreleased)")
    repository.commit()


def write_an_old_date(repository: Repository) -> None:
    day = date.today() - timedelta(30)
    repository.replace("CHANGELOG.md", "^## .*", f"## 0.9.0 ({day})")
    repository.replace("CITATION.cff", "^date-released: .*", f"date-released: {day}")
    repository.commit()


def write_a_later_date(repository: Repository) -> None:
    day = date.today() + timedelta(2)
    repository.replace("CHANGELOG.md", "^## .*", f"## 0.9.0 ({day})")
    repository.replace("CITATION.cff", "^date-released: .*", f"date-released: {day}")
    repository.commit()


def keep_changes_unreleased(repository: Repository) -> None:
    repository.replace("CHANGELOG.md", "^## ", "## Unreleased\n\n### Added\n\n- More.\n\n## ")
    repository.commit()


def have_no_section(repository: Repository) -> None:
    repository.replace("CHANGELOG.md", r"^## (?s:.*)", "")
    repository.commit()


def list_no_change(repository: Repository) -> None:
    repository.replace("CHANGELOG.md", "^- All.", "")
    repository.commit()


def list_another_kind(repository: Repository) -> None:
    repository.replace("CHANGELOG.md", "^### Added", "### Internal")
    repository.commit()


def have_the_tag(repository: Repository) -> None:
    repository.git("tag", "v0.9.0")


def have_a_later_tag(repository: Repository) -> None:
    repository.git("tag", "v0.10.0")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (change_a_file, "the tree has changes that are not committed, such as LICENSE"),
        (cite_another_version, "CITATION.cff: version is 0.8.0, cydist/config.py states 0.9.0"),
        (cite_another_day, "CITATION.cff: date-released is 2001-01-01"),
        (state_another_version, 'CHANGELOG.md: its first section is "0.9.0 ('),
        (state_no_version, '"soon" is no version'),
        (state_it_twice, "pyproject.toml states a version of its own"),
        (write_no_date, 'in place of "## 0.9.0 (unreleased)"'),
        (write_an_old_date, "CHANGELOG.md: the date of 0.9.0 is"),
        (write_a_later_date, "CHANGELOG.md: the date of 0.9.0 is"),
        (keep_changes_unreleased, 'CHANGELOG.md: its first section is "Unreleased"'),
        (have_no_section, "CHANGELOG.md has no section"),
        (list_no_change, 'CHANGELOG.md: "Added" of 0.9.0'),
        (list_another_kind, 'CHANGELOG.md: "Internal" is not one of'),
        (have_the_tag, "the tag v0.9.0 exists"),
        (have_a_later_tag, "the tag v0.10.0 is of a later version than 0.9.0"),
    ],
    ids=lambda each: each.__name__ if callable(each) else "",
)
def test_it_refuses(
    repository: Repository, fault: Callable[[Repository], None], words: str
) -> None:
    """Before it builds anything."""
    fault(repository)
    done = repository.release()
    assert done.returncode == 1
    assert words in done.stderr
    assert repository.steps() == []


def test_it_names_all_faults(repository: Repository) -> None:
    """At once."""
    cite_another_version(repository)
    list_no_change(repository)
    change_a_file(repository)
    assert len(repository.release().stderr.splitlines()) == 3


@pytest.mark.parametrize("step", STEPS)
def test_a_script_that_fails_ends_it(repository: Repository, step: str) -> None:
    """The others after it do not run, and nothing says that the commit can be released."""
    repository.stand_in(step, "exit 3")
    repository.commit()
    done = repository.release()
    assert done.returncode == 1
    assert f"scripts/{step}" in done.stderr
    assert repository.steps()[-1] == f"{step} true"
    assert "git tag" not in done.stdout


@pytest.mark.parametrize(
    ("change", "words"),
    [("rm -f *cp312*", "lacks cydist-0.9.0-cp312"), ("touch old.whl", "has old.whl")],
    ids=["missing", "more"],
)
def test_it_refuses_another_build(repository: Repository, change: str, words: str) -> None:
    """The sdist and one wheel for each CPython have to lie there, and nothing else."""
    repository.stand_in(
        "wheels", f'mkdir -p "$1" && cd "$1" && touch {" ".join(BUILD)} && {change}'
    )
    repository.commit()
    assert words in repository.release().stderr
    assert repository.steps() == ["docs true", "wheels true"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo changed >>CITATION.cff", "the tree has changes"),
        (
            "git -c user.name=x -c user.email=x@example.org commit -q --allow-empty -m x",
            "is no longer the last commit",
        ),
    ],
    ids=["file", "commit"],
)
def test_what_was_checked_is_what_is_there(repository: Repository, body: str, words: str) -> None:
    """A change during the checks is found."""
    repository.stand_in("test-all", body)
    repository.commit()
    done = repository.release()
    assert words in done.stderr
    assert "git tag" not in done.stdout


def test_only_the_date_is_missing(tmp_path: Path) -> None:
    """The files of this repository are those of a release, but for its date."""
    repository = Repository(tmp_path)
    for path in STATED:
        shutil.copy(ROOT / path, tmp_path / path)
    today = date.today()
    repository.replace("CHANGELOG.md", r"^## (\S+) \(.*\)", rf"## \1 ({today})")
    repository.replace("CITATION.cff", r"^date-released: .*\n", "")
    repository.replace("CITATION.cff", r"\Z", f"date-released: {today}\n")
    repository.commit()
    done = repository.release("--files")
    assert done.stderr == ""
