"""The example in docs/examples: right gradients, and the same numbers however it is started."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from launched_hosts import without_notices

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "docs/examples/digits.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("digits", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["digits"] = module
    spec.loader.exec_module(module)
    return module


def launcher(name: str) -> list[str]:
    """The command that starts two ranks of a script under `name`."""
    if name == "cydistrun":
        return [sys.executable, "-m", "cydist.run", "--nproc-per-node", "2"]
    if name == "torchrun":
        pytest.importorskip("torch")
        return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    binaries = ROOT / f".venv-{name}/bin"
    if not binaries.exists():
        pytest.skip(f"no .venv-{name}: scripts/test-mpi makes it")
    return [str(binaries / "mpirun"), "-n", "2", str(binaries / "python")]


def train(name: str, framework: str, output: Path, *options: str) -> dict[str, list[float]]:
    """Run the example on two ranks; the losses of both trainings."""
    command = [*launcher(name), str(SCRIPT), "--framework", framework, "--output", str(output)]
    # What an mpirun needs on a machine with few cores, in a container.
    tolerant = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    result = subprocess.run(
        [*command, *options],
        cwd=ROOT,
        env=dict(os.environ) | tolerant | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    backend = "mpi" if name in ("openmpi", "mpich") else "tcp"
    assert f"{framework}, world size 2, backend {backend!r}" in result.stdout
    assert (output / f"digits-{framework}.png").stat().st_size > 0
    numbers = json.loads((output / f"digits-{framework}.json").read_text())
    return {which: numbers[which]["losses"] for which in ("several", "single")}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """The losses in numpy under cydistrun."""
    return train("cydistrun", "numpy", tmp_path_factory.mktemp("cydistrun"))


def test_one_rank_finds_the_same(reference: dict[str, list[float]]) -> None:
    """Two ranks train as one rank does, up to rounding."""
    assert len(reference["several"]) == 20
    np.testing.assert_allclose(reference["several"], reference["single"], rtol=0, atol=1e-4)


@pytest.mark.more
@pytest.mark.parametrize("name", ["torchrun", "openmpi", "mpich"])
def test_same_numbers_under(name: str, reference: dict[str, list[float]], tmp_path: Path) -> None:
    """Another launcher, and MPI as the backend, give the very same losses."""
    assert train(name, "numpy", tmp_path) == reference


@pytest.mark.more
def test_torch_trains_alike(reference: dict[str, list[float]], tmp_path: Path) -> None:
    """In torch the same training gives the same losses, up to rounding."""
    pytest.importorskip("torch")
    found = train("cydistrun", "torch", tmp_path)
    np.testing.assert_allclose(found["several"], reference["several"], rtol=0, atol=1e-4)


@pytest.mark.more
def test_starts_itself(tmp_path: Path) -> None:
    """Without a launcher the example starts its own ranks, as many as asked for."""
    command = [sys.executable, str(SCRIPT), "--ranks", "3", "--epochs", "12"]
    options = ["--framework", "numpy", "--backend", "tcp", "--output", str(tmp_path)]
    result = subprocess.run(
        [*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=150, check=False
    )
    assert (result.returncode, without_notices(result.stderr)) == (0, "")
    assert "numpy, world size 3, backend 'tcp'" in result.stdout
    digests = [line.split()[-1] for line in result.stdout.splitlines() if "    rank " in line]
    assert len(digests) == 3
    assert len(set(digests)) == 1


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gradients_add_up(size: int, digits: ModuleType) -> None:
    """The average of the ranks' gradients is the gradient of the whole batch."""
    data = digits.load_digits()
    model = digits.NumpyModel()
    batch = np.arange(117)
    whole = model.gradients(data.train_images[batch], data.train_labels[batch], 117)
    shares = [
        model.gradients(
            data.train_images[batch[rank::size]], data.train_labels[batch[rank::size]], 117 / size
        )
        for rank in range(size)
    ]
    for arrays, expected in zip(zip(*shares, strict=True), whole, strict=True):
        np.testing.assert_allclose(np.mean(arrays, axis=0), expected, rtol=0, atol=1e-6)


def test_backward_pass_is_right(digits: ModuleType) -> None:
    """The gradients written out for numpy are those that torch finds."""
    pytest.importorskip("torch")
    data = digits.load_digits()
    images, labels = data.train_images[:50], data.train_labels[:50]
    ours = digits.NumpyModel().gradients(images, labels, 50)
    theirs = [gradient.numpy() for gradient in digits.TorchModel().gradients(images, labels, 50)]
    theirs[1::2] = [weight.T for weight in theirs[1::2]]
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-6)


def test_the_others_go_on_after_a_death() -> None:
    """docs/examples/survive.py: the error names the rank, and the replicas stay equal."""
    command = [sys.executable, "-m", "cydist.run", "--keep-going", "--nproc-per-node", "3"]
    script = ROOT / "docs/examples/survive.py"
    done = subprocess.run(
        [*command, script], cwd=ROOT, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 137, done.stderr
    for rank in (0, 2):
        assert f"[{rank}]   PeerFailedError: all_reduce_coalesced #" in done.stdout
    assert done.stdout.count(" on the default group: rank 1 on ") == 2
    assert "[0]   now rank 0 of 2" in done.stdout
    assert "[2]   now rank 1 of 2" in done.stdout
    assert "[0]   replicas are equal after the death of rank 1" in done.stdout


@pytest.mark.parametrize(
    ("ranks", "seconds", "cores", "words"),
    [
        (2, 0.5, 2, "2 ranks train 2.00 times as fast as one"),
        (2, 2.0, 2, "not faster than one here (0.50 times): 50% of their time is communication"),
        (4, 2.0, 2, "4 ranks are not faster than one here (0.50 times): they share 2 cores"),
    ],
    ids=["faster", "slower", "more ranks than cores"],
)
def test_the_speed_is_told_as_it_was(
    digits: ModuleType, monkeypatch: pytest.MonkeyPatch, ranks: int, seconds: float, cores: int,
    words: str,
) -> None:  # fmt: skip
    """Faster, or a reason why not."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    several = digits.History(ranks, compute=[seconds / 2], communication=[seconds / 2])
    single = digits.History(1, compute=[1.0], communication=[0.0])
    assert words in digits.speed_up(several, single)
