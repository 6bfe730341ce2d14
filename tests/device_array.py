"""An array in a GPU for tests: host memory, with the interface of CUDA arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from typing import Self

    from cydist import devices


class DeviceArray:
    """Memory of GPU `index`, whose library is `lib`."""

    def __init__(self, lib: devices.ArrayLibrary, memory: np.ndarray, index: int) -> None:
        self.lib = lib
        self.memory = memory
        self.index = index
        self.whole: Self | None = None

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3, "shape": self.memory.shape, "typestr": self.memory.dtype.str,
            "strides": self.memory.strides, "data": (self.memory.ctypes.data, False),
        }  # fmt: skip

    @property
    def dtype(self) -> np.dtype:
        """numpy's, which knows the names of what has no typestr."""
        return self.memory.dtype

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.index

    def __getitem__(self, key: Any) -> Self:
        return self.view(self.memory[key])

    def view(self, memory: np.ndarray) -> Self:
        """Another view of the memory."""
        made = type(self)(self.lib, memory, self.index)
        made.whole = self
        return made

    def get(self) -> np.ndarray:
        """What is in it when the current stream has come so far."""
        self.lib.synchronize(self.lib.current_stream(self.index))
        return self.memory.copy()
