"""A rank's GPU through cupy or torch: streams, events, arithmetic. Tests replace it with a
stand-in."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from typing import Any, Protocol

from cydist import config
from cydist._native import ITEMSIZES
from cydist.backends.nccl.binding import INSTALL
from cydist.backends.nccl.nccl_conf import setting
from cydist.backends.nccl.torch_kernels import TorchFunctions
from cydist.devices import array_libraries, cuda_driver
from cydist.devices.array_libraries import NON_BLOCKING
from cydist.errors import UnsupportedError
from cydist.net.interfaces import boot_id

UUIDS_SINCE = 23000  # NCCL's version: it distinguishes GPUs by their UUIDs
HIGHEST_OF_TORCH = -1
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
        with contextlib.suppress(Exception):  # what the pool keeps for this stream is no use later
            chosen = self._cuda.stream._BaseStream(stream, self.index)
            self.functions.get_default_memory_pool().free_all_blocks(chosen)
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


class TorchGpu:
    """This thread's current device, through torch, for programs without cupy."""

    def __init__(self) -> None:
        self._torch: Any = importlib.import_module("torch")
        self.functions: Any = TorchFunctions()
        self._cuda: Any = self._torch.cuda
        self._driver = cuda_driver.load()
        self.lib: array_libraries.ArrayLibrary = array_libraries.of_torch()
        self.index = int(self._cuda.current_device())
        self._cuda.set_device(self.index)  # this thread has a context from now on
        self._context = 0 if self._driver is None else self._driver.context()

    def use(self) -> None:
        if self._cuda.current_device() != self.index:
            self._cuda.set_device(self.index)

    def adopt(self) -> None:
        if self._driver is not None and self._context:
            self._driver.make_current(self._context)
        else:
            self._cuda.set_device(self.index)

    def stream(self, high_priority: bool) -> int:
        if not high_priority:
            return self.lib.stream(self.index)
        stream: int = self._cuda.Stream(self.index, priority=HIGHEST_OF_TORCH).cuda_stream
        return stream

    def current_streams(self) -> list[int]:
        return [self.lib.current_stream(self.index)]

    def is_captured(self, stream: int) -> bool:
        return stream not in (0, 1) and self.capture(stream) is not None

    def capture(self, stream: int) -> int | None:
        return None if self._driver is None else self._driver.capture(stream)

    def drop_stream(self, stream: int) -> None:
        """Do nothing: it belongs to torch's pool."""

    def view(self, address: int, count: int, dtype: str) -> Any:
        shown = _Memory(address, count * ITEMSIZES[dtype])
        raw = self._torch.as_tensor(shown, device=f"cuda:{self.index}")
        return raw.view(getattr(self._torch, dtype))

    def identity(self, version: int) -> str:
        found = self._cuda.get_device_properties(self.index)
        place = [getattr(found, f"pci_{part}_id", 0) for part in ("domain", "bus", "device")]
        bus_id = "{:04x}:{:02x}:{:02x}.0".format(*place)
        if not any(place) and self._driver is not None:  # torch before 2.8 does not say it
            bus_id = self._driver.uuid(self.index) or bus_id
        return gpu_identity(version, bus_id, self._driver, self.index)

    def capability(self) -> int:
        major, minor = self._cuda.get_device_capability(self.index)
        return int(10 * major + minor)


class _Memory:
    """Bytes of the GPU, for torch."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, False),
        }  # fmt: skip


def through_torch() -> bool:
    """Return whether torch serves the backend instead of cupy: as the user asks, or because cupy is
    not installed."""
    wanted = config.NCCL_BINDING.get().strip().lower()
    return wanted == "torch" or (
        not wanted and not _is_installed("cupy") and _is_installed("torch")
    )


def _is_installed(name: str) -> bool:
    if name in sys.modules:
        return sys.modules[name] is not None
    return importlib.util.find_spec(name) is not None


def gpu_identity(version: int, bus_id: str, driver: cuda_driver.Driver | None, index: int) -> str:
    """Return a GPU's identity. NCCL goes by the place on the PCI bus, and from 2.30 on by the UUID,
    so two parts of a GPU that MIG makes differ. NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks share one
    from then on."""
    host = setting(config.NCCL_HOSTID, version) or boot_id()
    if version < UUIDS_SINCE:
        return f"{host}/{bus_id}"
    if setting(config.NCCL_MULTI_RANK_GPU_ENABLE, version).strip() == "1":
        return f"{host}/{bus_id}/{os.getpid()}"
    uuid = driver.uuid(index) if driver is not None else ""
    return f"{host}/{uuid}/{bus_id}" if uuid else f"{host}/{bus_id}"


def current() -> Gpu:
    """Return this thread's current GPU. Raises UnsupportedError, which names what is missing."""
    if through_torch():
        if importlib.import_module("torch").cuda.device_count() == 0:
            raise UnsupportedError(
                "backend 'nccl' needs a GPU, and torch finds none (CUDA_VISIBLE_DEVICES: "
                f"{config.CUDA_VISIBLE_DEVICES.get()!r}): use backend 'tcp' or 'mpi'"
            )
        return TorchGpu()
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
