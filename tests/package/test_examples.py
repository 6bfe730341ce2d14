"""Every program of the pages runs, and prints what its page shows."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
from transport_ranks import free_port

from cydist.launch import options

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(?:`(\w+\.py)`:\n\n)?```(\w+)\n(.*?)```", re.S)
DEADLINE = 100.0  # seconds for one job: torch takes long to import on a busy machine
pytestmark = pytest.mark.timeout(DEADLINE + 20)
PROGRAMS = {  # what stands for a program of the shell
    "cydistrun": [sys.executable, "-m", "cydist.run"],
    "python": [sys.executable],
    "pytest": [sys.executable, "-m", "pytest", "-p", "_cydist_pytest"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}

# Programs that no command of their page starts: by page and number, a test that runs them ...
ELSEWHERE = {
    ("dev/backend.md", 0): "tests/examples/test_backend_example.py::test_the_tutorial_shows_it",
    ("dev/backend.md", 1): "tests/examples/test_backend_example.py::test_the_tutorial_shows_it",
    ("dev/backend.md", 2): "tests/examples/test_backend_example.py::test_the_tutorial_shows_it",
    ("guide/frameworks.md", 0): "tests/clients/test_clients.py::test_documented_program",
    ("guide/frameworks.md", 1): "tests/clients/test_clients.py::test_documented_program",
    ("guide/launching.md", 0): "tests/package/test_docs.py::test_example_of_a_file",
    ("guide/launching.md", 1): "tests/package/test_docs.py::test_example_of_a_store",
    ("guide/mpi4py.md", 0): (
        "tests/backends/mpi/test_documented_examples.py::test_the_same_ranks_as_mpi4py"
    ),
}
INIT = "import cydist as dist\nimport numpy as np\n"
TORCH = "import torch\n"
END = "\ndist.destroy_process_group()\n"
# ... or what comes before and after them, and words that are replaced; they run on two ranks.
COMPLETED: dict[tuple[str, int], tuple[str, str, dict[str, str]]] = {
    ("dev/lab_notes.md", 0): ("", "", {"5_000_000": "500"}),
    ("dev/lab_notes.md", 1): ("", "", {"300": "40", "2000": "20"}),
    ("guide/backends.md", 0): (TORCH, END, {}),
    ("guide/debugging.md", 0): ("", "\nlogging.getLogger('mine').info('here')\n", {}),
    ("guide/debugging.md", 1): ("", "\nassert list(seconds) == ['all_reduce']\n", {}),
    ("guide/mpi4py.md", 1): ("", "\nassert rank < size == 2\n" + END, {}),
    ("guide/mpi4py.md", 2): (
        INIT + "dist.init_process_group()\nrank, size = dist.get_rank(), dist.get_world_size()\n",
        "\nassert dist.get_process_group_ranks(mine) == [rank]" + END,
        {},
    ),
    ("guide/testing.md", 0): ("", "", {}),
    ("guide/torch.md", 1): (TORCH, "\nmodel(torch.ones(8)).sum().backward()" + END, {}),
    ("guide/torch.md", 2): (
        TORCH + INIT + "dist.init_process_group()\ngradients = np.ones(3)\n",
        "\nassert 'cydist:all_reduce' in open(f'rank{dist.get_rank()}.json').read()" + END,
        {"rank0.json": "rank{dist.get_rank()}.json", "chrome_trace(": "chrome_trace(f"},
    ),
}  # fmt: skip
ALONE = {("guide/launching.md", 2): "3 epochs on ranks [0, 1, 2, 3]\n"}  # and what is printed


def place(page: Path) -> str:
    """A page's name in docs/."""
    return page.name if page.parent == ROOT else str(page.relative_to(ROOT / "docs"))


@dataclass
class Run:
    """Command lines of one block, or of two that run at the same time, and what they print."""

    page: Path
    commands: list[str]
    printed: list[list[str]]

    @property
    def id(self) -> str:
        return f"{place(self.page)}:{' '.join(self.commands[0].split()[-4:])}"


def programs(page: Path) -> dict[str, str]:
    """The programs that a page tells its reader to save."""
    return {name: text for name, kind, text in BLOCK.findall(page.read_text()) if name}


def runs(page: Path) -> list[Run]:
    """The blocks of a page that start one of its programs."""
    found: list[Run] = []
    names = programs(page)
    for _, kind, text in BLOCK.findall(page.read_text()):
        if kind != "console" or not any(name in text for name in names):
            continue
        command, *printed = text.splitlines()
        if printed and printed[0].startswith("$ "):
            continue  # several commands, which print nothing
        joined = found and "--node-rank" in command and "--node-rank" in found[-1].commands[0]
        if joined:
            found[-1].commands.append(command.removeprefix("$ "))
            found[-1].printed.append(printed)
        else:
            found.append(Run(page, [command.removeprefix("$ ")], [printed]))
    return found


RUNS = [run for page in PAGES for run in runs(page)]


def python_blocks() -> dict[tuple[str, int], tuple[str, str]]:
    """All blocks of Python, by page and number: the name under which to save them, and the text."""
    return {
        (place(page), number): (name, text)
        for page in PAGES
        for number, (name, text) in enumerate(
            (name, text) for name, kind, text in BLOCK.findall(page.read_text()) if kind == "python"
        )
    }


def start(command: str, folder: Path, port: int) -> subprocess.Popen[str]:
    """Start one command line of a page."""
    words = shlex.split(command, comments=True)
    place = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder / "state")}
    place |= {"HOME": str(folder), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        place[name] = value
    if "--node-rank" in words:
        words[1:1] = ["--master-port", str(port)]
    arguments = [*PROGRAMS[words[0]], *words[1:]]
    return subprocess.Popen(
        arguments, cwd=folder, env=place, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def plain(text: str, folder: Path) -> str:
    """Without what differs from machine to machine."""
    text = re.sub(r"(?m)^\[\d\] ", "", text)
    text = re.sub(r"(?m)^( *rank \d+ on) \S+", r"\1 HOST", text)
    return text.replace(f"{folder}/", "")


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.id)
def test_a_page_shows_what_its_command_prints(run: Run, tmp_path: Path) -> None:
    """In whatever order ranks print. `...` stands for lines that are left out."""
    if "torch" in run.commands[0]:
        pytest.importorskip("torch")
    for name, text in programs(run.page).items():
        (tmp_path / name).write_text(text)
    port = free_port()
    started = [start(command, tmp_path, port) for command in run.commands]
    try:
        said = [each.communicate(timeout=DEADLINE) for each in started]
    finally:
        for each in started:
            each.kill()
            each.wait()
    for expected, (out, err) in zip(run.printed, said, strict=True):
        if "..." in expected:
            rest = iter(plain(out + err, tmp_path).splitlines())
            missing = [line for line in expected if line != "..." and line not in rest]
            assert missing == [], out + err
        elif expected:
            # Ranks of torchrun write a line and its end separately, so two lines may end together.
            rest = out
            for line in sorted(expected, key=len, reverse=True):
                assert line in rest, out + err
                rest = rest.replace(line, "", 1)
            assert rest.strip() == "", out + err
        else:
            assert started[0].returncode == 0, out + err


def test_every_program_runs_in_a_test() -> None:
    """Each is started by a command of its page, completed here, or run by a test elsewhere."""
    started = {
        (place(page), name)
        for page in PAGES
        for run in runs(page)
        for name in programs(page)
        if any(name in command for command in run.commands)
    }
    left = {key for key, (name, _) in python_blocks().items() if (key[0], name) not in started}
    assert left == {*ELSEWHERE, *COMPLETED, *ALONE}
    for test in ELSEWHERE.values():
        path, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text()


@pytest.mark.parametrize("key", COMPLETED, ids=lambda key: f"{key[0]}-{key[1]}")
def test_a_part_of_a_program_runs(key: tuple[str, int], tmp_path: Path) -> None:
    """On two ranks, with what must come before and after it."""
    before, after, replaced = COMPLETED[key]
    if "torch" in before:
        pytest.importorskip("torch")
    text = python_blocks()[key][1]
    for old, new in replaced.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "part.py").write_text(before + text + after)
    job = start("cydistrun --nproc-per-node 2 part.py", tmp_path, 0)
    out, err = job.communicate(timeout=DEADLINE)
    assert job.returncode == 0, out + err


@pytest.mark.parametrize("key", ALONE, ids=lambda key: f"{key[0]}-{key[1]}")
def test_a_program_without_a_launcher_runs(key: tuple[str, int], tmp_path: Path) -> None:
    """It starts its ranks itself."""
    (tmp_path / "program.py").write_text(python_blocks()[key][1])
    job = start("python program.py", tmp_path, 0)
    assert job.communicate(timeout=DEADLINE) == (ALONE[key], "")


def test_the_error_in_the_readme_is_real() -> None:
    """The tutorial shows it too, in the launcher's report, where the former test compares it."""
    shown = re.findall(r"```text\n(cydist\.\w+Error.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(shown) == 1
    assert textwrap.indent(shown[0], " " * 4) in (ROOT / "docs/tutorial.md").read_text()


def launcher_lines() -> list[tuple[str, str]]:
    """Every command line of cydistrun in a block, with its page."""
    return [
        (place(page), line)
        for page in PAGES
        for _, kind, text in BLOCK.findall(page.read_text())
        if kind in ("console", "text", "bash")
        for line in text.replace("\\\n", " ").splitlines()
        if re.match(r"(\$ )?([A-Z_]+=\S+ )*cydistrun ", line)
    ]


def test_command_lines_are_valid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """cydistrun takes each of them, and no path in a command is wrong."""
    lines = launcher_lines()
    assert len(lines) > 15
    monkeypatch.setattr(options, "renew_user_secret", lambda: "secret")
    monkeypatch.chdir(tmp_path)
    for page, line in lines:
        words = shlex.split(line, comments=True)
        arguments = words[words.index("cydistrun") + 1 :]
        assert [w for w in words if w.startswith("docs/") and not (ROOT / w).exists()] == [], page
        for script in (each for each in words if each.endswith(".py")):
            Path(script).parent.mkdir(parents=True, exist_ok=True)
            Path(script).touch()
        if not {"gpu", "--version", "--new-secret"} & set(arguments):
            options.parse(arguments)
