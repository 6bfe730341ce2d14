"""PyTorch's ways to train in parallel give on "cydist" the numbers that they give on gloo."""

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
PROGRAM = ROOT / "tests/interop/torch_training.py"

pytestmark = [pytest.mark.slow, pytest.mark.more, pytest.mark.timeout(200)]

Results = list[dict[str, Any]]


@pytest.fixture(
    scope="module",
    params=[2, pytest.param(4, marks=pytest.mark.long)],
    ids="{} ranks".format,
)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each rank found in a torchrun of all scenarios."""
    folder = tmp_path_factory.mktemp("training")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(request.param), str(PROGRAM), str(folder)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=180, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    found: Results = []
    for rank in range(request.param):
        found.append(json.loads((folder / f"{rank}.json").read_text()))
    return found


@pytest.mark.parametrize("name", names_in(PROGRAM, "SCENARIOS"))
def test_same_numbers_as_gloo(name: str, results: Results) -> None:
    """The same bits: what ranks add together is exact in any order.

    But for PowerSGD, which multiplies by random numbers. It trains in float64 here: there another
    order changes a sum of four by at most 3 parts in 2**53, and to orthogonalize two columns
    makes up to a million times as much of it.
    """
    for rank in results:
        assert rank[name]["error"] == ""
        if name == "ddp_powersgd_hook" and len(results) > 2:
            assert rank[name]["difference"] < 1e6 * 3 / 2**53
        else:
            assert rank[name]["same"]
