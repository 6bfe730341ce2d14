"""cupy's binding as we call it, what it cannot say, and what it says where something is missing."""

from __future__ import annotations

import builtins
import ctypes
import sys
import threading
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist.backends.nccl import binding, create, cuda
from cydist.backends.nccl.binding import CupyNccl, NcclError
from cydist.backends.nccl.cuda import current as current_gpu  # a fixture replaces it
from cydist.backends.nccl.libnccl import LibNccl
from cydist.backends.nccl.options import high_priority
from cydist.backends.nccl.plan_runner import scaled_one
from cydist.backends.nccl.reductions import FLOAT8, SUM, TYPES
from cydist.groups import registry
from cydist.testing import oracle

SIGNATURES = {
    "allReduce": "sendbuf, recvbuf, count, datatype, op, stream",
    "reduce": "sendbuf, recvbuf, count, datatype, op, root, stream",
    "broadcast": "sendbuff, recvbuff, count, datatype, root, stream",
    "reduceScatter": "sendbuf, recvbuf, recvcount, datatype, op, stream",
    "allGather": "sendbuf, recvbuf, count, datatype, stream",
    "send": "sendbuf, count, datatype, peer, stream",
    "recv": "recvbuf, count, datatype, peer, stream",
    "commSplit": "color, key, config=None",
}


@pytest.fixture
def nccl(standin: Any) -> Any:
    """cupy.cuda.nccl, over the stand-in."""
    return binding.load_cupy()


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_binding_takes_what_we_pass(nccl: Any, name: str) -> None:
    """The order of the arguments of each call is as we have it."""
    text = getattr(nccl.NcclCommunicator, name).__doc__.splitlines()[0]
    arguments = text.partition("(")[2].rpartition(")")[0].split(", ")[1:]
    assert ", ".join(each.split()[-1] for each in arguments) == SIGNATURES[name]


def test_numbers_are_the_bindings(nccl: Any) -> None:
    """Types and operations that the binding names have our numbers."""
    for name, code in TYPES.items():
        if not name.startswith("float8"):
            assert getattr(nccl, f"NCCL_{name.upper()}") == code
    assert [getattr(nccl, f"NCCL_{op}") for op in ("SUM", "PROD", "MAX", "MIN", "AVG")] == [
        *range(5)
    ]


def test_a_unique_id_is_a_secret_of_128_bytes(standin: Any) -> None:
    """Every one is another."""
    found = [CupyNccl().unique_id() for _ in range(2)]
    assert [len(each) for each in found] == [128, 128]
    assert found[0] != found[1]


def test_the_version_is_that_of_the_library(standin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded counts, not what cupy was built for; one that is too old is refused."""
    assert CupyNccl().version() == 22809
    assert binding.version_text(22809) == "2.28.9"
    monkeypatch.setenv("STANDIN_VERSION", "21003")
    with pytest.raises(dist.UnsupportedError, match=r"needs NCCL 2.19.0 or later, and 2.10.3"):
        create.load()


@pytest.mark.parametrize("status", [7, 8])
def test_results_without_a_text_are_understood(nccl: Any, status: int) -> None:
    """cupy raises KeyError for what newer libraries answer."""
    with pytest.raises(KeyError) as raised:
        raise nccl.NcclError(status)
    found = CupyNccl().as_nccl_error(raised.value)
    assert isinstance(found, NcclError)
    assert found.status == status


def test_errors_of_others_are_not_nccls(standin: Any) -> None:
    """Only what NCCL answers has a meaning."""
    assert CupyNccl().as_nccl_error(KeyError("x")) is None
    assert CupyNccl().as_nccl_error(ValueError(7)) is None


@pytest.fixture
def alone(standin: Any, gpus: Any) -> Any:
    """A communicator of one rank, whose calls run at once."""
    standin.use_streams(None)
    made = CupyNccl()
    comm = made.init(1, made.unique_id(), 0)
    yield comm
    comm.abort()
    standin.use_streams(gpus)


def test_nccls_answer_is_an_error_in_its_words(alone: Any) -> None:
    """A refused call raises; `as_nccl_error` has the result's text, and the last error's."""
    x = np.ones(3)
    with pytest.raises(RuntimeError) as raised:
        alone.all_reduce(x.ctypes.data, x.ctypes.data, 3, 99, SUM, 0)
    found = CupyNccl().as_nccl_error(raised.value)
    assert found is not None
    assert found.status == 4
    assert "invalid argument" in str(found)
    assert "stand-in: type" in str(found)


def test_an_end_comes_once(alone: Any, standin: Any) -> None:
    """abort and destroy from several threads end the communicator a single time."""
    standin.log()
    threads = [
        threading.Thread(target=end) for end in (alone.abort, alone.destroy, alone.abort) * 3
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sum(line in ("0 abort", "0 destroy") for line in standin.log()) == 1
    assert alone.async_error() == ""


def test_an_end_under_way_is_waited_for(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By who ends it as well, and by the end of the process, for which it is alive until then."""
    begun, gate = threading.Event(), threading.Event()

    class Slow:
        def abort(self) -> None:
            begun.set()
            gate.wait(20)
            real.abort()

    real, alone._comm = alone._comm, Slow()
    monkeypatch.setattr(binding, "EXIT_SECONDS", 0.05)
    monkeypatch.setattr(binding, "alive", {alone})  # communicators of other tests go on
    first, second = (threading.Thread(target=alone.abort, daemon=True) for _ in range(2))
    first.start()
    assert begun.wait(20)
    second.start()
    try:
        binding.end_all()
        assert alone in binding.alive
        second.join(0.05)
        assert second.is_alive()
    finally:
        gate.set()
        for thread in (first, second):
            thread.join(20)
    assert alone not in binding.alive
    assert not second.is_alive()


def test_an_asynchronous_error_is_a_text(alone: Any, standin: Any) -> None:
    """LibNccl asks the library itself; without it cupy's check does."""
    assert alone.async_error() == ""
    standin.lib.standin_fail(ctypes.c_void_p(alone._pointer), 6)
    assert "remote process exited" in alone.async_error()
    alone._libnccl = types.SimpleNamespace(async_error=lambda comm: None)
    assert "NCCL_ERROR_REMOTE_ERROR" in alone.async_error()


def test_who_ends_it_waits_for_who_asks(alone: Any) -> None:
    """A communicator is not freed while another thread asks it for errors."""
    ended = threading.Event()

    def asked(comm: int) -> int:
        ender.start()
        assert not ended.wait(0.1)  # as it would be by now
        return 0

    def end() -> None:
        alone.abort()
        ended.set()

    ender = threading.Thread(target=end, daemon=True)
    alone._libnccl = types.SimpleNamespace(async_error=asked)
    assert alone.async_error() == ""
    assert ended.wait(20)
    assert alone.async_error() == ""


def test_an_ended_communicator_takes_no_factors(alone: Any) -> None:
    """NCCL is not given the address of what it has freed."""
    op = alone.premul(TYPES["float64"], scaled_one("float64", 3))
    alone.abort()
    asked: list[str] = []
    alone._libnccl = types.SimpleNamespace(
        premul=lambda *given: asked.append("made") or 0,
        drop_premul=lambda *given: asked.append("dropped"),
    )
    alone.drop_premul(op)
    with pytest.raises(NcclError, match="was ended meanwhile"):
        alone.premul(TYPES["float64"], scaled_one("float64", 2))
    assert asked == []


@pytest.mark.parametrize("dtype", TYPES)
def test_factors_are_elements_of_the_type(alone: Any, dtype: str) -> None:
    """PREMUL_SUM's factor reaches the library as that dtype has it."""
    scalar = scaled_one(dtype, 3)
    assert scalar == np.array([3]).astype(oracle.DTYPES[dtype]).tobytes()
    x = np.array([1, 2]).astype(oracle.DTYPES[dtype])
    y = x.copy()
    op = alone.premul(TYPES[dtype], scalar)
    if dtype in FLOAT8:  # of one rank; test_premul_sum has several
        with pytest.raises(Exception, match="invalid argument"):
            alone.all_reduce(x.ctypes.data, y.ctypes.data, 2, TYPES[dtype], op, 0)
        return
    alone.all_reduce(x.ctypes.data, y.ctypes.data, 2, TYPES[dtype], op, 0)
    assert y.astype("f8").tolist() == [3.0, 6.0]


def test_an_old_library_has_no_premul(monkeypatch: pytest.MonkeyPatch) -> None:
    """UnsupportedError, where the function is not there."""
    libnccl = LibNccl()
    monkeypatch.setattr(libnccl, "_library", None)
    with pytest.raises(dist.UnsupportedError, match="PREMUL_SUM needs an NCCL"):
        libnccl.premul(0, 7, b"")


# What may be missing.


def test_without_cupy_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """UnsupportedError with the packages to install, and what works without."""
    real = builtins.__import__

    def broken(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("cupy"):
            raise ModuleNotFoundError("No module named 'cupy'")
        return real(name, *arguments, **options)

    monkeypatch.setattr(binding.importlib, "import_module", broken)
    with pytest.raises(dist.UnsupportedError, match=r"needs cupy.*pip install cupy-cuda13x.*'tcp'"):
        binding.load_cupy()


def test_without_a_library_the_error_says_so(nccl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """cupy without libnccl: UnsupportedError with the package to install."""
    monkeypatch.setattr(nccl, "available", False)
    with pytest.raises(dist.UnsupportedError, match=r"no libnccl.so.2, .*nvidia-nccl-cu13"):
        create.load()


def test_without_a_gpu_the_error_says_so(nccl: Any) -> None:
    """This machine has cupy and no driver; or another one has no device."""
    runtime = sys.modules["cupy.cuda"].runtime
    try:
        devices = runtime.getDeviceCount()
    except runtime.CUDARuntimeError:
        devices = 0
    if devices:
        pytest.skip("no CUDA device is what this is about")
    with pytest.raises(dist.UnsupportedError, match=r"needs a GPU"):
        gpu_current()


# Kept: the fixture `gpus` puts another function in its place.
gpu_current = cuda.current


def test_another_binding_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """CYDIST_NCCL_BINDING knows three words."""
    monkeypatch.setenv("CYDIST_NCCL_BINDING", "pynvml")
    with pytest.raises(
        ValueError, match="CYDIST_NCCL_BINDING='pynvml': there are cupy, torch and nccl4py"
    ):
        create.load()


@pytest.mark.parametrize("version", ["13.6.0", "14.0.1", "14.0.0rc1"])
def test_an_old_cupy_is_named(nccl: Any, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """UnsupportedError with the version: cupy 13's unique ids are tuples, and 14.0 keeps the GIL
    where the device may make it wait."""
    monkeypatch.setattr(sys.modules["cupy"], "__version__", version)
    with pytest.raises(dist.UnsupportedError, match=f"cupy 14.1 or later, and {version} is inst"):
        binding.load_cupy()


def test_nccl4py_needs_cupys_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """UnsupportedError that says so, where cupy is not installed."""
    monkeypatch.setenv("CYDIST_NCCL_BINDING", "nccl4py")
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(dist.UnsupportedError, match="needs cupy for its streams"):
        current_gpu()


def test_the_backend_is_available_where_cupy_is(nccl: Any) -> None:
    """is_nccl_available looks for the package, and imports nothing."""
    assert dist.is_nccl_available()
    assert dist.is_backend_available("nccl")


class Config:
    """As torch's NCCLConfig."""

    def __init__(self) -> None:
        self.blocking = self.max_ctas = -(1 << 31)

    def unsafe_get_ptr(self) -> int:
        return id(self)


def test_a_configuration_that_is_ignored_warns() -> None:
    """torch would pass it to NCCL. cydist has no way to, with cupy's binding."""
    options = types.SimpleNamespace(is_high_priority_stream=True, config=Config())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert high_priority(options)
    options.config.max_ctas = 8
    with pytest.warns(RuntimeWarning, match=r"ignores pg_options.config \(max_ctas\)"):
        assert high_priority(options)


def test_options_are_torchs(gpus: Any) -> None:
    """pg_options may ask for a stream of high priority; other objects are refused."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)

    def body(rank: int) -> list[bool]:
        made = [dist.new_group([0, 1], pg_options=each) for each in (None, options)]
        with pytest.raises(TypeError, match=r"must be ProcessGroupNCCL.Options"):
            dist.new_group([rank], pg_options="fast")
        return [group.gpu.high_priority[-1] for group in made]

    from cydist.testing import run_threads

    assert run_threads(body, 2, "nccl") == [[False, True]] * 2


@pytest.mark.parametrize("for_cuda", [False, True])
def test_a_torch_for_cuda_makes_the_backend_available(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, for_cuda: bool
) -> None:
    """Where cupy is not installed: a torch for CPUs does not."""
    (tmp_path / "lib").mkdir()
    if for_cuda:
        (tmp_path / "lib/libtorch_cuda.so").touch()
    torch = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    found = {"torch": torch}
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name, *given: found.get(name))
    assert dist.is_nccl_available() is for_cuda
