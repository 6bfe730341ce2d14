"""Events and captures by CUDA's driver, over functions that note how they are called."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from cydist.devices import array_libraries, cuda_driver


class Library:
    """Functions of the driver, for a thread in the mode "global".

    Attributes:
        captures: By stream: its state and the number of its capture.
    """

    def __init__(self) -> None:
        self.mode = 0
        self.asked: list[tuple[int, int]] = []
        self.answer = cuda_driver.NOT_READY

        def exchange(mode: object) -> int:
            self.mode, mode[0] = mode[0], self.mode  # type: ignore[index]
            return 0

        def query(event: int) -> int:
            self.asked.append((event, self.mode))
            return self.answer

        def capture(stream: int, state: object, number: object, *nothing: object) -> int:
            assert nothing == (None, None, None)
            state[0], number[0] = self.captures.get(stream, (0, 0))  # type: ignore[index]
            return 0 if stream != 9 else 901  # cudaErrorStreamCaptureInvalidated

        self.captures = {7: (cuda_driver.ACTIVE, 1 << 40), 8: (2, 3), 9: (cuda_driver.ACTIVE, 4)}
        long, address = ctypes.POINTER(ctypes.c_uint64), ctypes.c_void_p
        pointer = ctypes.POINTER(ctypes.c_int)
        self.cuStreamGetCaptureInfo_v2 = ctypes.CFUNCTYPE(
            ctypes.c_int, address, pointer, long, address, address, address
        )(capture)
        self.cuThreadExchangeStreamCaptureMode = ctypes.CFUNCTYPE(ctypes.c_int, pointer)(exchange)
        self.cuEventQuery = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(query)
        self.contexts: list[int] = []

        def current(context: object) -> int:
            context[0] = 0x5000  # type: ignore[index]
            return 0

        def use(context: int) -> int:
            self.contexts.append(context)
            return 0

        def uuid(into: int, device: int) -> int:
            ctypes.memmove(into, bytes(range(16)), 16)
            return device

        self.cuCtxGetCurrent = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(address))(current)
        self.cuCtxSetCurrent = ctypes.CFUNCTYPE(ctypes.c_int, address)(use)
        self.cuDeviceGetUuid = ctypes.CFUNCTYPE(ctypes.c_int, address, ctypes.c_int)(uuid)


def test_a_question_ends_no_capture() -> None:
    """The thread's mode is "relaxed" while it asks, and afterwards what it was."""
    library = Library()
    assert cuda_driver.Driver(library).query(1 << 40) == cuda_driver.NOT_READY
    assert library.asked == [(1 << 40, cuda_driver.RELAXED)]
    assert library.mode == 0


def test_captures_have_numbers() -> None:
    """None for a stream that is not captured, or in a capture that is broken."""
    found = cuda_driver.Driver(Library())
    assert [found.capture(stream) for stream in (7, 6, 8, 9)] == [1 << 40, None, None, None]


def test_cupys_events_are_asked_by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not over, over, and an error of the device, which is cupy's exception."""
    pytest.importorskip("cupy")
    library = Library()
    monkeypatch.setattr(cuda_driver, "load", lambda: cuda_driver.Driver(library))
    cupy = array_libraries.Cupy()
    event = SimpleNamespace(handle=77)
    found = []
    for library.answer in (cuda_driver.NOT_READY, 0):
        found.append(cupy.is_over(event))  # type: ignore[arg-type]
    assert found == [False, True]
    library.answer = 700
    with pytest.raises(cupy._runtime.CUDARuntimeError, match="cudaErrorIllegalAddress"):
        cupy.is_over(event)  # type: ignore[arg-type]
    assert [event for event, _ in library.asked] == [77] * 3


def test_memory_ends_no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the GPU, and pinned memory, which another thread may take beside a capture; also
    where there is none."""
    modes = []

    def take(*arguments: object) -> None:
        modes.append(library.mode)
        raise MemoryError

    library = Library()
    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", lambda name: library)
    runtime = SimpleNamespace(eventQuery=None, getDevice=lambda: 0)
    cuda = SimpleNamespace(runtime=runtime, PinnedMemory=take)
    cupy = SimpleNamespace(cuda=cuda, empty=take)
    monkeypatch.setattr(array_libraries.importlib, "import_module", lambda name: cupy)
    lib = array_libraries.Cupy()
    for call in (lambda: lib.allocate(0, 8), lambda: lib.pinned(8)):
        with pytest.raises(MemoryError):
            call()
    assert modes == [cuda_driver.RELAXED] * 2
    assert library.mode == 0


def test_pinned_memory_is_freed_in_no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of a group which another thread destroys beside a capture."""
    library, memory, modes = Library(), bytearray(8), []

    class Memory:
        def __init__(self, nbytes: int) -> None:
            self.ptr = ctypes.addressof(ctypes.c_char.from_buffer(memory))

        def __del__(self) -> None:
            modes.append(library.mode)

    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", lambda name: library)
    runtime = SimpleNamespace(eventQuery=None)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, PinnedMemory=Memory))
    monkeypatch.setattr(array_libraries.importlib, "import_module", lambda name: cupy)
    array = array_libraries.Cupy().pinned(8)
    assert (array.nbytes, modes) == (8, [])
    del array
    assert modes == [cuda_driver.RELAXED]
    assert library.mode == 0


def test_torch_ends_no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no cupy: torch's events, and its pinned memory, which asks for events."""
    library, modes = Library(), []

    def note(*arguments: object, **options: object) -> Any:
        modes.append(library.mode)
        return bytearray(8)

    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", lambda name: library)
    kinds = dict.fromkeys(("uint8", "int16", "int32", "int64", "complex128"))
    torch = SimpleNamespace(**kinds, empty=note)
    monkeypatch.setattr(array_libraries.importlib, "import_module", lambda name: torch)
    lib = array_libraries.Torch()
    assert lib.pinned(8).nbytes == 8
    assert lib.is_over(SimpleNamespace(query=note))
    assert modes == [cuda_driver.RELAXED] * 2
    assert library.mode == 0


def test_a_thread_of_ours_leaves_its_device_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device 0 is never made current behind a step of a thread that was adopted for another; one
    for device 0 says so, too, since it has no context before."""
    pytest.importorskip("cupy")
    cupy, chosen = array_libraries.Cupy(), [0]
    runtime = SimpleNamespace(
        getDevice=lambda: chosen[-1],
        setDevice=chosen.append,
        eventRecord=lambda event, stream: None,
    )
    monkeypatch.setattr(cupy, "_runtime", runtime)
    for device in (2, 0):
        chosen[:] = [0]
        cupy.adopt(device)
        cupy.record(SimpleNamespace(handle=7), device, 5)  # type: ignore[arg-type]
        assert chosen == [0, device]


def test_where_there_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """None, and cupy asks by itself."""

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert cuda_driver.load() is None


def test_a_context_is_made_a_threads() -> None:
    """By two functions that take no lock of CUDA's and let other threads of Python run."""
    library = Library()
    driver = cuda_driver.Driver(library)
    driver.make_current(driver.context())
    assert library.contexts == [0x5000]


def test_a_gpu_has_an_identity() -> None:
    """None where CUDA does not know it."""
    driver = cuda_driver.Driver(Library())
    assert [driver.uuid(0), driver.uuid(1)] == [bytes(range(16)).hex(), ""]


def test_a_forked_child_destroys_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no CUDA, and would only write an ignored exception."""
    destroyed: list[int] = []
    runtime = SimpleNamespace(
        eventDestroy=destroyed.append, eventCreateWithFlags=lambda flags: flags + 5
    )
    ours, inherited = (array_libraries._Event(runtime) for _ in range(2))
    del ours
    assert destroyed == [7]
    monkeypatch.setattr(array_libraries.os, "getpid", lambda: 0)
    del inherited
    assert destroyed == [7]
