"""Ranks that are processes: the steps of scripts/test-gpu, over the stand-in."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[2] / "programs/gpu.py"
GROUPS, BRIDGE = PROGRAM.with_name("gpu_groups.py"), PROGRAM.with_name("gpu_bridge.py")
EXAMPLE = PROGRAM.with_name("gpu_example.py")
HOST_TIME = PROGRAM.with_name("nccl_host_time.py")
SCRIPT = PROGRAM.parents[2] / "scripts/test-gpu"
LIMIT = 100  # seconds, for a machine that does much else; a program's calls have 60
pytestmark = pytest.mark.timeout(2 * LIMIT + 20)  # two programs


def started(standins: Path, step: str, ranks: int, program: Path = PROGRAM, **settings: str) -> Any:
    """A step, when it is over."""
    command = [sys.executable, "-m", "cydist.run", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*command, str(program), *step.split()],
        env={**os.environ, "STANDIN": str(standins), "PYTHONWARNINGS": "ignore", **settings},
        capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip


def ran(
    standins: Path, step: str, ranks: int, program: Path = PROGRAM, **settings: str
) -> list[dict[str, Any]]:
    """What the ranks of a step say last, in their order."""
    result = started(standins, step, ranks, program, **settings)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line[line.index("{") :]) for line in result.stdout.splitlines()]
    last = {each["rank"]: each for each in lines}
    assert sorted(last) == [*range(ranks)]
    return [last[rank] for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 3])
def test_correctness(standins: Path, ranks: int) -> None:
    """Every call, from separate processes, on arrays of cupy's and tensors of torch's."""
    for said in ran(standins, "correctness", ranks):
        assert said["calls"]["cupy"] > 500
        assert said["calls"]["torch"] > 300


def test_streams(standins: Path) -> None:
    """Order, lifetimes, and graphs that are replayed, as far as the stand-in for CUDA goes."""
    for said in ran(standins, "streams", 2):
        assert said["captured"]


def test_overhead_beside_others(standins: Path) -> None:
    """Every way is timed. torch's own calls are gloo's here."""
    for said in ran(standins, "overhead", 1, STANDIN_TORCH_NCCL="1"):
        assert not [name for name in said if name.endswith("_failed")], said
        for way in ("raw", "cydist", "cydist async", "cydist on torch", "cupyx", "torch async"):
            assert said[f"{way}_us"] > 0, said
        assert said["alone"]["cydist async_over_raw_us"] == pytest.approx(
            said["alone"]["cydist async_us"] - said["alone"]["raw_us"], abs=0.02
        )


def test_overhead_without_others(standins: Path, tmp_path: Path) -> None:
    """A library that is missing, or does not come back on one rank, is a line of what is said, and
    the step goes on."""
    hangs = tmp_path / "cupyx/distributed"
    hangs.mkdir(parents=True)
    (hangs.parent / "__init__.py").touch()
    (hangs / "__init__.py").write_text(HANGS)
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    limits = json.dumps({"by_cupyx": 1})
    for said in ran(standins, "overhead", 2, PYTHONPATH=path, OVERHEAD_LIMITS=limits):
        assert said["by_cupyx_failed"] == "not over after 1 s"
        assert "NCCL" in said["by_torch_failed"]
        assert said["cydist_us"] > 0


HANGS = """
import os, threading
def init_process_group(*given, **options):
    threading.Event().wait(0 if os.environ["RANK"] == "0" else None)
    raise SystemExit
"""


@pytest.mark.parametrize("only", ["", "torch"])
def test_staging(standins: Path, only: str) -> None:
    """cupy's arrays and torch's tensors over TCP, copied by cupy, and by torch alone."""
    pytest.importorskip("torch")
    for said in ran(standins, "staging", 2, PROGRAM.with_name("gpu_staging.py"), ONLY=only):
        assert ("cupy" in said) == (not only)
        for library in {"cupy", "torch"} & set(said):
            assert said[library]["calls"] > 90
            assert said[library]["seconds"]["share"] > 0


def test_a_group_gives_its_scratch_memory_back(standins: Path) -> None:
    """cupy's pool keeps freed blocks by stream, and no call uses the group's stream after its
    end."""
    for said in ran(standins, "", 2, PROGRAM.with_name("gpu_scratch.py")):
        assert said["scratch"] > 0, said
        assert said["kept"] == [0, 0, 0], said


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_the_examples_learn(standins: Path, library: str) -> None:
    """By reductions that nobody waits for: as many ranks as one learn the same."""
    pytest.importorskip(library)
    (alone,) = ran(standins, library, 1, EXAMPLE)
    together = ran(standins, library, 2, EXAMPLE)
    assert alone["losses"][-1] < alone["losses"][0] / 2
    for each in together:
        assert each["losses"] == pytest.approx(alone["losses"], abs=0.002)


@pytest.mark.parametrize(
    ("step", "ranks", "checks"),
    [("split", 4, 4), ("memory", 2, 2), ("default", 1, 3), ("shared", 2, 2)],
)
def test_groups(standins: Path, step: str, ranks: int, checks: int) -> None:
    """Every check of a step about groups is made, and holds."""
    result = started(standins, step, ranks, GROUPS)
    assert result.returncode == 0, result.stdout + result.stderr
    said = [json.loads(line[line.index("{") :]) for line in result.stdout.splitlines()]
    assert all(each["ok"] for each in said)
    for rank in range(ranks):
        assert len([each for each in said if each["rank"] == rank]) >= checks


def test_bridge(standins: Path) -> None:
    """The step's calls are right on the CPU's tensors, so a failure on a GPU is the GPU's."""
    pytest.importorskip("torch")
    for said in ran(standins, "bridge", 2, BRIDGE):
        assert said["failed"] == []


def test_the_host_time_of_calls_is_printed() -> None:
    """Of each kind of call, on cupy arrays and torch tensors."""
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "cydist.run", "--nproc-per-node", "1", str(HOST_TIME)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [json.loads(line[line.index("{") :]) for line in done.stdout.splitlines()]
    assert {"all_reduce", "all_to_all_single", "all_reduce of torch's async"} <= {
        each["call"] for each in said
    }


def test_faults(standins: Path) -> None:
    """Different calls, a late rank and a dead one are errors on every rank that lives."""
    said = ran(standins, "faults", 3)
    assert {each["death"] for each in said if each["rank"] < 2} == {"PeerFailedError"}
    assert {each["left"] for each in said if each["rank"] < 2} == {2}


def test_a_failure_may_end_the_process(standins: Path) -> None:
    """With NCCL_ASYNC_ERROR_HANDLING=1 no rank goes on after a failed call."""
    result = started(standins, "faults", 2, NCCL_ASYNC_ERROR_HANDLING="1")
    assert result.returncode != 0
    assert "ends, as asked: MismatchError: all_reduce #2 on group '1'" in result.stderr


def test_the_steps_take_an_hour_at_most() -> None:
    """By their own timeouts, and none more than 8 minutes, whatever the machine does."""
    text = SCRIPT.read_text()
    steps = re.findall(r'^ +(\w+)\) ranks="([\d ]+)" seconds=(\d+)', text, re.MULTILINE)
    assert {name for name, _, _ in steps} == set(re.search(r"\$\{\*:-(.*?)\}", text)[1].split())
    grace = int(re.search(r"timeout -k (\d+)", text)[1])
    bounds = [len(ranks.split()) * (int(seconds) + grace) for _, ranks, seconds in steps]
    assert max(bounds) <= 8 * 60
    assert sum(bounds) <= 60 * 60


def scripted(folder: Path, *steps: str, **settings: str) -> Any:
    """scripts/test-gpu, when it is over."""
    given = {"VENV": sys.prefix, "RESULTS": str(folder), "PYTHONWARNINGS": "ignore", **settings}
    return subprocess.run(
        ["sh", str(SCRIPT), *steps], env={**os.environ, **given}, capture_output=True, text=True,
        timeout=LIMIT, check=False,
    )  # fmt: skip


def test_the_script_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    """Before any step, and what to do."""
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is one")
    done = scripted(tmp_path / "results", "correctness", STANDIN="")
    assert done.returncode == 2
    assert "scripts/test-gpu needs a GPU of NVIDIA's, and here is no driver" in done.stderr
    assert not (tmp_path / "results").exists()


def test_the_script_goes_on_after_a_step_that_fails(standins: Path, tmp_path: Path) -> None:
    """And writes what each step said, and a table."""
    done = scripted(tmp_path, "nccl4py", "exit", STANDIN=str(standins))
    found = json.loads((tmp_path / "results.json").read_text())
    runs = {run["step"]: run for run in found["runs"]}
    assert runs["exit"]["ok"]
    assert found["versions"]["gpu"] == "none: over the stand-ins"
    table = (tmp_path / "results.md").read_text()
    assert "| `exit` | 2 | passes |" in table
    if importlib.util.find_spec("nccl") is None:  # nccl4py
        assert done.returncode == 1
        assert "failed: nccl4py/2" in done.stdout
        assert "| `nccl4py` | 2 | fails: " in table


def test_nccl_serves_torch_without_cupy(standins: Path) -> None:
    """Every call, by torch's memory, streams and arithmetic, which no import of cupy precedes."""
    pytest.importorskip("torch")
    for ranks in (1, 2):
        for said in ran(standins, "correctness", ranks, ONLY="torch"):
            assert said["calls"].keys() == {"torch"}
            assert said["failed"] == []
