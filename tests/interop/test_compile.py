"""What torch.compile makes of programs with collectives gives on "cydist" the bits of gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from program_tables import names_in

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests/interop/torch_compiled.py"
RANKS = 2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

Results = list[dict[str, Any]]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("aot_eager", marks=pytest.mark.more),
        pytest.param("inductor", marks=pytest.mark.long),
    ],
)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each rank found in a torchrun of all scenarios, compiled by this backend."""
    folder = tmp_path_factory.mktemp("compiled")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(RANKS), str(PROGRAM), str(folder), request.param]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=480, check=False,
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("name", names_in(PROGRAM, "SCENARIOS"))
def test_same_bits_as_gloo(name: str, results: Results) -> None:
    """The compiled program raises nothing, and its results are those that it has on gloo."""
    for rank in results:
        assert rank[name] == {"error": "", "same": True}
