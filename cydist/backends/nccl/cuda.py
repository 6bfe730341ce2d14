"""A rank's GPU through cupy: streams, events, arithmetic. Tests replace it with a stand-in."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, Protocol

from cydist import config
from cydist.backends.nccl.binding import INSTALL
from cydist.devices import array_libraries, cuda_driver
from cydist.devices.array_libraries import NON_BLOCKING
from cydist.errors import UnsupportedError
from cydist.net.interfaces import boot_id

UUIDS_SINCE = 23000  # NCCL's version: it distinguishes GPUs by their UUIDs
HIGHEST = -100  # CUDA clamps this to the highest existing priority


class Gpu(Protocol):
    """The operations that the backend needs of a GPU besides `array_libraries.ArrayLibrary`.

    Attributes:
        index: Its number in this process.
        lib: Streams, events and memory.
        functions: numpy's functions, for this GPU's arrays.
    """

    index: int
    lib: array_libraries.ArrayLibrary
    functions: Any

    def use(self) -> None:
        """Make it this thread's current device."""

    def adopt(self) -> None:
        """Make it the device of one of cydist's threads, which may have had none."""

    def stream(self, high_priority: bool) -> int:
        """Return a new stream that does not wait for the legacy default stream."""

    def current_streams(self) -> list[int]:
        """Return the current streams of this process's libraries in this thread."""

    def is_captured(self, stream: int) -> bool:
        """Return whether the stream is being captured into a CUDA graph."""

    def capture(self, stream: int) -> int | None:
        """Return the number of a captured stream's capture, if it is known."""

    def drop_stream(self, stream: int) -> None:
        """Release a stream from `stream` that gets no more work; its present work still runs."""

    def view(self, address: int, count: int, dtype: str) -> Any:
        """Return an array of `count` elements at an address, for `functions`."""

    def identity(self, version: int) -> str:
        """Return this GPU's identity on this host, as a version of NCCL distinguishes GPUs."""

    def capability(self) -> int:
        """Return the compute capability: 90 for 9.0."""


class CupyGpu:
    """This thread's current device, through cupy."""

    def __init__(self) -> None:
        self.functions: Any = importlib.import_module("cupy")
        self._cuda: Any = self.functions.cuda
        self._runtime: Any = self._cuda.runtime
        self._driver = cuda_driver.load()
        self.lib: array_libraries.ArrayLibrary = array_libraries.Cupy()
        self.index = int(self._runtime.getDevice())
        self._runtime.setDevice(self.index)  # this thread has a context from now on
        self._context = 0 if self._driver is None else self._driver.context()

    def use(self) -> None:
        if self._runtime.getDevice() != self.index:
            self._runtime.setDevice(self.index)

    def adopt(self) -> None:
        if self._driver is not None and self._context:
            self._driver.make_current(self._context)
        else:
            self.lib.adopt(self.index)

    def stream(self, high_priority: bool) -> int:
        self.use()
        if high_priority:
            return int(self._runtime.streamCreateWithPriority(NON_BLOCKING, HIGHEST))
        return int(self._runtime.streamCreateWithFlags(NON_BLOCKING))

    def current_streams(self) -> list[int]:
        found = [self.lib.current_stream(self.index)]
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            stream = int(torch._C._cuda_getCurrentRawStream(self.index))
            if stream not in found:
                found.append(stream)
        return found

    def is_captured(self, stream: int) -> bool:
        # CUDA refuses this query for the legacy default stream, which is never captured.
        return stream not in (0, 1) and bool(self._runtime.streamIsCapturing(stream))

    def capture(self, stream: int) -> int | None:
        return None if self._driver is None else self._driver.capture(stream)

    def drop_stream(self, stream: int) -> None:
        self.use()
        self._runtime.streamDestroy(stream)

    def view(self, address: int, count: int, dtype: str) -> Any:
        kind = self.functions.dtype(dtype)
        memory = self._cuda.UnownedMemory(address, count * kind.itemsize, None, self.index)
        return self.functions.ndarray(count, kind, self._cuda.MemoryPointer(memory, 0))

    def identity(self, version: int) -> str:
        device = self._cuda.Device(self.index).pci_bus_id
        return gpu_identity(version, str(device), self._driver, self.index)

    def capability(self) -> int:
        return int(self._cuda.Device(self.index).compute_capability)


def gpu_identity(version: int, bus_id: str, driver: cuda_driver.Driver | None, index: int) -> str:
    """Return a GPU's identity. NCCL goes by the place on the PCI bus, and from 2.30 on by the UUID,
    so two parts of a GPU that MIG makes differ. NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks share one
    from then on."""
    host = config.NCCL_HOSTID.get() or boot_id()
    if version < UUIDS_SINCE:
        return f"{host}/{bus_id}"
    if config.NCCL_MULTI_RANK_GPU_ENABLE.get().strip() == "1":
        return f"{host}/{bus_id}/{os.getpid()}"
    uuid = driver.uuid(index) if driver is not None else ""
    return f"{host}/{uuid}/{bus_id}" if uuid else f"{host}/{bus_id}"


def current() -> Gpu:
    """Return this thread's current GPU. Raises UnsupportedError, which names what is missing."""
    try:
        runtime = importlib.import_module("cupy.cuda").runtime
    except ImportError as error:
        raise UnsupportedError(
            f"backend 'nccl' needs cupy for its streams, whichever binding calls NCCL ({error}): "
            f"{INSTALL}"
        ) from None
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        raise UnsupportedError(
            f"backend 'nccl' needs a GPU, and CUDA finds none: {error}. Where there is one, its "
            f"driver or its container's rights are missing, or it is of another CUDA version than "
            f"cupy: {INSTALL}. Without one use backend 'tcp' or 'mpi'"
        ) from None
    if count == 0:
        raise UnsupportedError(
            "backend 'nccl' needs a GPU, and there is none (CUDA_VISIBLE_DEVICES: "
            f"{config.CUDA_VISIBLE_DEVICES.get()!r}): use backend 'tcp' or 'mpi'"
        )
    return CupyGpu()
