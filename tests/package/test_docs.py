"""README.md and docs/ claim what is there: links, names, settings, errors, examples."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from transport_ranks import free_port

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PROSE = re.compile(r"```.*?```", re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
ROOMS = ("cydist/", "src/", "scripts/", "tests/", "docs/")


def name(path: Path) -> str:
    return path.name


def prose(path: Path) -> str:
    return PROSE.sub("", path.read_text())


def anchors(path: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link names a file, and an anchor that the file has."""
    broken = []
    for link in LINK.findall(prose(page)):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_paths_exist(page: Path) -> None:
    """Every path of the repository that a page names is there, and every test of a file."""
    words = {word.strip('"') for code in CODE.findall(prose(page)) for word in code.split()}
    assert [word for word in words if word.startswith(ROOMS) and not is_there(word)] == []


def is_there(word: str) -> bool:
    """A path, also with wild cards, or a test as pytest names it: tests/test_x.py::test_y[z]."""
    path, _, test = word.partition("::")
    found = list(ROOT.glob(path.rstrip("/")))
    return bool(found) and (not test or f"def {test.partition('[')[0]}(" in found[0].read_text())


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_public_names_exist(page: Path) -> None:
    """Whatever a page calls dist.x or cydist.x is public."""
    import cydist

    used = set(re.findall(r"\b(?:dist|cydist)\.([A-Za-z]\w*)", page.read_text()))
    modules = {path.stem for path in (ROOT / "cydist").iterdir()} | {"backends"}
    assert used - modules - set(cydist.__all__) == set()


def test_the_readme_is_short() -> None:
    """A reader gets to its end."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_page_is_unfinished(page: Path) -> None:
    """No page promises to say something later."""
    assert re.findall(r"\b(?:TBD|TODO|FIXME|XXX)\b", page.read_text()) == []


def test_every_attack_has_its_test() -> None:
    """security.md names a test in each row of its tables of attackers and launchers, or says "not
    protected"; for each attack every setting has one row."""
    page = (ROOT / "docs/guide/security.md").read_text()
    attacks, launchers = page.split("\n## Attackers\n")[1].split("\n## Launchers\n")
    settings: dict[str, list[str]] = {}
    for attack, under, _, test in rows_of(attacks):
        settings.setdefault(attack or list(settings)[-1], []).extend(under.split(", "))
        assert is_test(test), test
    everything = sorted(["default", "`CYDIST_ENCRYPT=1`", "`CYDIST_INSECURE=1`", "`CYDIST_NAT=1`"])
    assert len(settings) > 10
    assert [a for a, s in settings.items() if sorted(s) != everything and s != ["all"]] == []
    tests = [row[-1] for row in rows_of(launchers)]
    assert len(tests) > 5
    assert [test for test in tests if not is_test(test)] == []
    values = page.split("\n## Values in stores that others can write\n")[1]
    rows = rows_of(values.split("\n## Attackers\n")[0], 5)
    assert len(rows) > 15
    assert [row for row in rows if row[2] not in ("yes", "no") or not is_test(row[-1])] == []


def rows_of(text: str, columns: int = 4) -> list[list[str]]:
    """The cells of a text's tables, without their heads."""
    found = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for table in re.findall(r"^\|[-|]+\|\n((?:\|.*\n)+)", text, re.M)
        for line in table.splitlines()
    ]
    assert {len(row) for row in found} == {columns}
    return found


def is_test(cell: str) -> bool:
    """Whether a cell names tests that exist, or says that there is no protection."""
    if cell == "not protected":
        return True
    names = [name for each in cell.split(", ") for name in CODE.findall(each)]
    return bool(names) and all("::" in name and is_there(name) for name in names)


def test_frameworks_are_those_that_are_tested() -> None:
    """frameworks.md has a row for each framework of the extra test-clients, in that version, with a
    line that the framework's program has, but for the backend's name."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = extras["optional-dependencies"]["test-clients"]
    pins = {re.sub(r"\[.*\]", "", each) for each in asked if "==" in each}
    page = (ROOT / "docs/guide/frameworks.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| ([\w-]+ [\d.]+) \| ([^|]+) \|$", page, re.M)
    assert {version.replace(" ", "==") for version, _ in rows} == pins
    for version, line in rows:
        name = version.split()[0].removeprefix("pytorch-")
        program = (ROOT / f"tests/clients/programs/train_{name}.py").read_text()
        written = CODE.findall(line)[0].partition('"')[0]
        assert written in program, (name, written)


def test_errors_are_listed() -> None:
    """errors.md has a section for every class of errors.py: its code is the heading, and its name
    the first word."""
    from cydist import errors

    kinds = [thing for thing in vars(errors).values() if isinstance(thing, type)]
    codes = {kind.code: kind.__name__ for kind in kinds if issubclass(kind, errors.DistError)}
    page = (ROOT / "docs/reference/errors.md").read_text()
    sections = re.findall(r"^## ([a-z-]+)\n\n`(\w+)`", page, re.M)
    assert dict(sections) == codes
    assert len(sections) == page.count("\n## ")


def test_every_public_error_has_a_code_of_its_own() -> None:
    """Which does not come from its base class: a program can tell them apart."""
    import cydist

    public = [getattr(cydist, each) for each in cydist.__all__]
    kinds = [each for each in public if isinstance(each, type) and issubclass(each, Exception)]
    assert len(kinds) > 15
    assert [kind for kind in kinds if "code" not in vars(kind)] == []
    assert len({kind.code for kind in kinds}) == len(kinds)


@pytest.mark.parametrize(
    ("killed", "expected"),
    [
        ((1,), ["0 of 2: [100. 100. 100.]\n", "", "1 of 2: [100. 100. 100.]\n"]),
        ((1, 2), ["ranks left: 1, fewer than 2\n", "", ""]),
    ],
    ids=["one", "most"],
)
def test_example_of_survivors(killed: tuple[int, ...], expected: list[str], tmp_path: Path) -> None:
    """failures.md's program goes on with two ranks of three when one is killed in a call, and not
    with one of three."""
    section = (ROOT / "docs/guide/failures.md").read_text()
    program = re.search(r"```python\n(.*?)```", section, re.S)
    assert program is not None
    place = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port()}"}
    common = {**os.environ, **place, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program[1]],
            env={
                **common,
                "RANK": f"{rank}",
                "CYDIST_FAILPOINT": "enter:kill:40" if rank in killed else "",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        said = ["".join(rank.communicate(timeout=50)) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert said == expected


@dataclass
class ByHand:
    """Starts copies of one of launching.md's programs for jobs that no launcher starts."""

    program: str
    environ: dict[str, str]

    def start(self, *arguments: str, **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", self.program, *arguments],
            env={**self.environ, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def print_all(self, *arguments: Sequence[str]) -> list[str]:
        """What copies with these arguments print, one for each rank."""
        ranks = [self.start(*each) for each in arguments]
        try:
            return ["".join(rank.communicate(timeout=50)) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


@pytest.fixture
def by_hand(tmp_path: Path) -> Callable[..., ByHand]:
    """One of launching.md's programs, in which some words are replaced."""
    section = (ROOT / "docs/guide/launching.md").read_text().split("## Without a launcher")[1]
    programs = re.findall(r"```python\n(.*?)```", section.split("\n## ")[0], re.S)
    assert len(programs) == 2
    outer = {n: v for n, v in os.environ.items() if not n.startswith(("CYDIST_", "MASTER_"))}
    environ = {**outer, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path / "state")}

    def make(word: str, by: str) -> ByHand:
        (program,) = [each for each in programs if word in each]
        return ByHand(program.replace(word, by), environ)

    return make


SUMS = 2 * ["[2. 2. 2.] of 2\n"]


def test_example_of_a_file(by_hand: Callable[..., ByHand], tmp_path: Path) -> None:
    """launching.md's program runs twice, and removes the file; also one that is left of
    ranks that were killed."""
    path = tmp_path / "job"
    job = by_hand("/shared/job-17", str(path))
    for killed in [job.start(CYDIST_FAILPOINT="rendezvous:kill") for _ in range(2)]:
        killed.communicate(timeout=50)
    assert path.exists()
    for _ in range(2):
        assert job.print_all((), ()) == SUMS
        assert not path.exists()


def test_example_of_a_store(by_hand: Callable[..., ByHand]) -> None:
    """launching.md's program runs on two ranks."""
    assert by_hand("29600", str(free_port())).print_all("0", "1") == SUMS


def test_batch_scripts_are_those_that_run() -> None:
    """docs/guide/slurm.md shows the files that tests/launch/test_slurm.py submits, whole."""
    shown = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/guide/slurm.md").read_text(), re.S)
    files = sorted((ROOT / "docs/examples/slurm").glob("*.sbatch"))
    assert sorted(shown) == sorted(path.read_text() for path in files)
    assert len(files) == 3
