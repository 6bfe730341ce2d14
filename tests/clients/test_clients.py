"""Frameworks train on cydist as they do on gloo: their own collectives, loops and checkpoints.

scripts/test-clients runs this in an environment that has them. ROUNDS=3 runs every program three
times on each backend, in turn.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).parent / "programs"
ROUNDS = int(os.environ.get("ROUNDS", "1"))
DEADLINE = 240  # of one job, in seconds; its ranks print their stacks before
FRAMEWORKS = {
    "lightning": "lightning",
    "accelerate": "accelerate",
    "transformers": "transformers",
    "torchmetrics": "torchmetrics",
    "ignite": "pytorch-ignite",
    "deepspeed": "deepspeed",
    "ray": "ray",
}  # by name, what pip calls them
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "RAY_USAGE_STATS_ENABLED": "0",
}

pytestmark = [pytest.mark.long, pytest.mark.timeout(2 * DEADLINE * ROUNDS + 60)]


def needs(name: str) -> str:
    """Return a framework's version, or skip the test where it is not installed."""
    try:
        return importlib.metadata.version(FRAMEWORKS[name])
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{FRAMEWORKS[name]} is not installed: scripts/test-clients installs it")


def start(name: str, folder: Path, backend: str, *options: str, path: Path = ROOT) -> Any:
    """Run a framework's program with two ranks; return its exit status and what it printed."""
    folder.mkdir()
    command = [sys.executable, str(PROGRAMS / f"train_{name}.py"), str(folder), backend, *options]
    if name != "ray":  # which starts ranks itself
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environ = {**os.environ, **OFFLINE, "PYTHONPATH": f"{path}{os.pathsep}{ROOT}"}
    with (folder / "output").open("w+") as output:
        job = subprocess.Popen(
            command, cwd=folder, env=environ, stdout=output, stderr=output, start_new_session=True
        )
        try:
            job.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGTERM)
            raise
        finally:
            end(job)
            output.seek(0)
            printed = output.read()
            print(f"{name} on {backend} ended with {job.returncode}")
    return job.returncode, printed


def end(job: subprocess.Popen[bytes]) -> None:
    """Let a job end within seconds, or kill its processes."""
    try:
        job.wait(15)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def train(name: str, folder: Path, backend: str, *options: str, path: Path = ROOT) -> list[Any]:
    """Run a framework's program; return what each rank saved."""
    status, printed = start(name, folder, backend, *options, path=path)
    assert status == 0, printed[-8000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def differing(left: list[Any], right: list[Any]) -> list[str]:
    """Return the names of the tensors whose bits differ, of each rank."""
    found = []
    for rank, pair in enumerate(zip(left, right, strict=True)):
        first, second = (saved["tensors"] for saved in pair)
        assert list(first) == list(second)
        assert len(first) > 10
        found += [f"rank {rank}: {n}" for n in first if not torch.equal(first[n], second[n])]
    return found


@pytest.mark.parametrize("name", ["accelerate", "ignite"])
def test_documented_program(name: str, tmp_path: Path) -> None:
    """frameworks.md's lines make a job of two ranks on cydist."""
    needs(name)
    page = (ROOT / "docs/guide/frameworks.md").read_text()
    (program,) = [
        each
        for each in re.findall(r"```python\n(.*?)```", page, re.S)
        if f"from {name}" in each or f"import {name}" in each
    ]
    text = program + "assert torch.distributed.get_backend() == 'cydist'\n"
    text += "assert torch.distributed.get_world_size() == 2\n"
    (tmp_path / "program.py").write_text(text + "torch.distributed.destroy_process_group()\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "program.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **OFFLINE, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=DEADLINE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_same_bits_as_gloo(name: str, tmp_path: Path) -> None:
    """Every parameter, loss, metric, checkpoint and result of a collective, on both ranks."""
    version = needs(name)
    rates: dict[str, list[float]] = {"gloo": [], "cydist": []}
    first = None
    for turn in range(ROUNDS):
        for backend in rates:
            saved = train(name, tmp_path / f"{backend} {turn}", backend)
            first = first or saved
            assert differing(first, saved) == []
            rates[backend].append(saved[0]["rate"])
    assert first is not None
    tensors = sum(len(saved["tensors"]) for saved in first)
    shown = {backend: " ".join(f"{rate:.0f}" for rate in found) for backend, found in rates.items()}
    print(f"{name} {version}: {tensors} tensors equal; gloo {shown['gloo']} steps/s, ", end="")
    print(f"cydist {shown['cydist']} steps/s")


REFUSALS = {
    "accelerate": "Your assigned backend cydist is not available, please use gloo",
    "transformers": "Your assigned backend cydist is not available, please use gloo",
    "ignite": "Backend should be one of",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_name_is_refused(name: str, tmp_path: Path) -> None:
    """A framework with a list of backends ends with its own error: docs/guide/frameworks.md."""
    needs(name)
    status, printed = start(name, tmp_path / "run", "cydist", "--by-name")
    assert status != 0
    assert REFUSALS[name] in printed


def test_ignite_leaves_the_model_unwrapped(tmp_path: Path) -> None:
    """auto_model returns the bare model without a word, and the replicas drift apart."""
    needs("ignite")
    ours = train("ignite", tmp_path / "ours", "cydist", "--auto")
    theirs = train("ignite", tmp_path / "theirs", "gloo", "--auto")
    apart = {}
    for backend, saved in (("cydist", ours), ("gloo", theirs)):
        weights = [each["tensors"]["model.0.weight"] for each in saved]
        apart[backend] = not torch.equal(*weights)
    assert apart == {"cydist": True, "gloo": False}


@pytest.mark.parametrize(("name", "changed", "options"), [
    ("accelerate", "accelerate", ["--by-name"]),
    ("transformers", "accelerate", ["--by-name"]),
    ("ignite", "ignite", ["--by-name", "--auto"]),
], ids=["accelerate", "transformers", "ignite"])  # fmt: skip
def test_upstream_patch(name: str, changed: str, options: list[str], tmp_path: Path) -> None:
    """With docs/frameworks' patch a framework takes the backend's name, and trains as on gloo."""
    needs(name)
    spec = importlib.util.find_spec(changed)
    assert spec is not None
    assert spec.origin is not None
    sources = tmp_path / "src"
    shutil.copytree(Path(spec.origin).parent, sources / changed)
    subprocess.run(
        ["git", "apply", f"-p{2 if changed == 'accelerate' else 1}",
         str(ROOT / f"docs/frameworks/{changed}.patch")],
        cwd=sources, check=True, timeout=30,
    )  # fmt: skip
    ours = train(name, tmp_path / "ours", "cydist", *options, path=sources)
    assert differing(ours, train(name, tmp_path / "theirs", "gloo")) == []
