"""What the programs of scripts/test-gpu do before a GPU is asked."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")


@pytest.fixture(params=["gpu_arrays", "gpu_staging"])
def arrays(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of a program that makes arrays."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "programs"))
    yield importlib.import_module(request.param)
    del sys.modules[request.param]


def test_a_torch_without_gpus_is_left_out(arrays: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """ImportError, on which the programs go on without its tensors."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ImportError, match="no GPU"):
        arrays.Torch()


@pytest.mark.parametrize("arrays", ["gpu_arrays"], indirect=True)
@pytest.mark.parametrize("dtype", ["f8", "f2", "c8", "?", ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(0,), (3,), (2, 0, 4)])
def test_tensors_of_any_size_and_dtype(arrays: Any, dtype: Any, shape: tuple[int, ...]) -> None:
    """There and back, empty ones as well."""
    library = object.__new__(arrays.Torch)
    library.torch, library.device = torch, "cpu"
    given = np.ones(shape, dtype)
    found = library.get(library.array(given))
    assert (found.dtype, found.tolist()) == (given.dtype, given.tolist())
