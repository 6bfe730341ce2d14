"""torch's tensors on a machine without a GPU: their memory is the CPU's, their streams are those of
fake_gpu_threaded.py. What shows them to cydist is torch's own C interface
(tests/backends/nccl/fake_tensors.c)."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fake_cuda
import fake_gpu_threaded
import fake_torch_cuda
import numpy as np
from fake_gpu import POISON

from cydist import asarray
from cydist._native import Array
from cydist.devices import array_libraries

FIRST = 3000  # torch's default streams are FIRST + device


def shown_on_gpus(folder: str | Path) -> Callable[[int], int]:
    """Says of all tensors that the calling thread passes from now on that they are on a GPU, or for
    -1 where they are; returns what was said before. Made before cydist looks at any tensor."""
    path = fake_cuda.built(fake_cuda.TENSORS, "fake_tensors.c", Path(folder))
    on: Callable[[int], int] = fake_torch_cuda.shown(path).tensors_on
    return on


class Tensors(fake_gpu_threaded.Gpus):
    """The library of torch's tensors, beside another one of the same GPUs."""

    name = "torch"
    first_stream = FIRST

    def __init__(self, gpus: fake_gpu_threaded.Gpus, tensors_on: Callable[[int], int]) -> None:
        super().__init__()
        self._streams, self.waits, self.captured = gpus._streams, gpus.waits, gpus.captured
        self.torch: Any = importlib.import_module("torch")
        self.tensors_on = tensors_on

    def use(self) -> None:
        """Torch has GPUs from now on, as far as cydist knows."""
        array_libraries._libraries[self.name] = self

    @contextmanager
    def here(self) -> Iterator[None]:
        """Tensors that this thread passes are on its GPU."""
        with self._on(fake_gpu_threaded.here()):
            yield

    @contextmanager
    def _on(self, device: int) -> Iterator[None]:
        before = self.tensors_on(device)
        try:
            yield
        finally:
            self.tensors_on(before)

    def allocate(self, device: int, nbytes: int) -> Array:
        with self._on(device):
            return asarray(self.array(np.zeros(nbytes, np.uint8)))

    def owns(self, owner: object) -> bool:
        return isinstance(owner, self.torch.Tensor)

    def array(self, values: Any) -> Any:
        given = np.ascontiguousarray(values)
        dtype = getattr(self.torch, given.dtype.name)
        if not given.size:
            return self.torch.empty(np.shape(values), dtype=dtype)
        memory = np.frombuffer(given.tobytes(), "u1").copy()
        shown, stream = memory[:], self.current_stream(fake_gpu_threaded.here())
        # Once given up it is used again by its stream, as torch's pool does.
        weakref.finalize(shown, self.enqueue, stream, lambda: memory.fill(POISON))
        return self.torch.from_numpy(shown).view(dtype).reshape(np.shape(values))

    def get(self, array: Any) -> np.ndarray:
        """What is in a tensor when torch's current stream has come so far."""
        import ml_dtypes

        self.synchronize(self.current_stream(fake_gpu_threaded.here()))
        name = str(array.dtype).removeprefix("torch.")
        kind = np.dtype(getattr(ml_dtypes, name, None) or name)
        raw = array.contiguous().reshape(-1).view(self.torch.uint8).numpy()
        return np.frombuffer(raw.tobytes(), kind).reshape(tuple(array.shape))
