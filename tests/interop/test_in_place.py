"""Calls in place through torch, on "cydist" beside gloo."""

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
PROGRAM = ROOT / "tests/interop/torch_in_place.py"

FORMS = names_in(PROGRAM, "FORMS")
Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Provide what each of three ranks found."""
    folder = tmp_path_factory.mktemp("in_place")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "3", str(PROGRAM), str(folder)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.parametrize("form", FORMS)
def test_in_place_equals_gloo_on_other_memory(form: str, results: Results) -> None:
    """The same bits, of contiguous and strided tensors, blocking and asynchronous."""
    assert [rank[form]["cydist"] for rank in results] == [[]] * 3


@pytest.mark.parametrize("form", [name for name in FORMS if name != "all_to_all_single"])
def test_gloo_allows_it_too(form: str, results: Results) -> None:
    """Every form that gloo computes in place; its all_to_all_single(x, x) may give anything."""
    assert [rank[form]["gloo"] for rank in results] == [[]] * 3
