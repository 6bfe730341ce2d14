"""Arrays for the steps of scripts/test-gpu: cupy's and torch's."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

RANK = int(os.environ.get("RANK", 0))
SIDE = 256 if "STANDIN" in os.environ else 4096  # of the matrices that keep the GPU busy
GRACE = 10.0  # seconds between a step's stacks and the end of its time; ranks start in less
SHARED = {
    "NCCL_HOSTID": f"cydist-{os.environ.get('MASTER_PORT')}-{RANK}",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # from NCCL 2.30 on
    "NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "none", "NCCL_TUNER_PLUGIN": "none",
    "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_SOCKET_FAMILY": "AF_INET",
    "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0",
    "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_NVLS_ENABLE": "0", "NCCL_RAS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2", "CUDA_MODULE_LOADING": "EAGER", "NCCL_DEBUG": "WARN",
}  # fmt: skip


def share_a_gpu() -> None:
    """Several ranks may have one GPU: each says that it is a host of its own, and NCCL then talks
    over sockets on the loopback interface. Before anything reads these variables."""
    for name, value in SHARED.items():
        os.environ.setdefault(name, value)


def give_stacks_in_time() -> None:
    """Print every thread's stack and end the process before its step's time is over."""
    seconds = float(os.environ.get("STEP_SECONDS", "150"))
    faulthandler.dump_traceback_later(max(1.0, seconds - GRACE), exit=True)


failed: list[str] = []  # checks, in this process


def say(what: str, ok: Any, **more: Any) -> None:
    """Print one check's result as a line of JSON."""
    if not ok:
        failed.append(what)
    line = {"rank": RANK, "check": what, "ok": bool(ok), **more}
    print(json.dumps(line, default=str), flush=True)


@contextlib.contextmanager
def check(what: str) -> Iterator[None]:
    """Say what is raised inside, and go on, as long as the default group is well."""
    import cydist as dist

    try:
        yield
    except Exception as error:
        say(what, False, raised=f"{type(error).__name__}: {error}"[:400])
        if dist.is_initialized() and dist.group.WORLD.error is not None:  # type: ignore[union-attr]
            raise


class Cupy:
    """Arrays of cupy on the current GPU."""

    name = "cupy"

    def __init__(self) -> None:
        cupy = self.cupy = importlib.import_module("cupy")
        local = int(os.environ.get("LOCAL_RANK", 0))
        cupy.cuda.Device(local % cupy.cuda.runtime.getDeviceCount()).use()

    def array(self, values: Any) -> Any:
        # By its bytes: cupy copies no floats of 8 bits, and needs kernels for none of this.
        given = np.ascontiguousarray(values)
        raw = self.cupy.asarray(np.frombuffer(given.tobytes() or b"\0", "u1"))
        return self.cupy.ndarray(np.shape(values), given.dtype, raw.data)

    def get(self, array: Any) -> np.ndarray:
        if not array.flags.c_contiguous or not array.size:
            return self.cupy.asnumpy(array)
        raw = self.cupy.asnumpy(self.cupy.ndarray(array.nbytes, "u1", array.data))
        return raw.view(array.dtype).reshape(array.shape)

    def reduces(self, dtype: np.dtype) -> bool:
        """Does this GPU's NCCL reduce it?"""
        from cupy.cuda import nccl

        modern = nccl.get_version() >= 22400 and int(self.cupy.cuda.Device().compute_capability)
        return not dtype.name.startswith("float8") or modern >= 90

    def versions(self) -> dict[str, Any]:
        from cupy.cuda import nccl

        runtime = self.cupy.cuda.runtime
        return {
            "cupy": self.cupy.__version__, "nccl": nccl.get_version(),
            "driver": runtime.driverGetVersion(),
            "gpu": runtime.getDeviceProperties(0)["name"].decode(),
        }  # fmt: skip


class Torch:
    """Tensors of torch on the GPU that is current for cupy."""

    name = "torch"
    device = "cuda"

    def __init__(self) -> None:
        torch = self.torch = importlib.import_module("torch")
        if not torch.cuda.is_available():
            raise ImportError("this torch has no GPU to work on")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())

    def array(self, values: Any) -> Any:
        torch, given = self.torch, np.ascontiguousarray(values)
        dtype = getattr(torch, given.dtype.name)
        if not given.size:  # torch gives no other dtype to a tensor of no bytes
            return torch.empty(np.shape(values), dtype=dtype, device=self.device)
        raw = torch.from_numpy(np.frombuffer(given.tobytes(), "u1").copy()).to(self.device)
        return raw.view(dtype).reshape(np.shape(values))

    def get(self, array: Any) -> np.ndarray:
        import ml_dtypes

        name = str(array.dtype).removeprefix("torch.")
        kind = np.dtype(getattr(ml_dtypes, name, None) or name)
        if not array.numel():
            return np.empty(tuple(array.shape), kind)
        raw = array.contiguous().reshape(-1).view(self.torch.uint8)
        return np.frombuffer(raw.cpu().numpy().tobytes(), kind).reshape(tuple(array.shape))

    def reduces(self, dtype: np.dtype) -> bool:
        return not dtype.name.startswith("float8")

    def versions(self) -> dict[str, Any]:
        from cydist.devices import cuda_driver

        cuda = self.torch.cuda
        return {
            "torch": self.torch.__version__, "nccl": cuda_driver.loaded_nccl_version(),
            "gpu": cuda.get_device_properties(0).name,
        }  # fmt: skip


def stand_in() -> Any:
    """With STANDIN=FOLDER what is built there takes the place of CUDA and of NCCL, below cupy and,
    where it is installed, torch, whose library is the result. Before anything imports cupy."""
    if not (folder := os.environ.get("STANDIN")):
        return None
    import fake_cuda

    fake_cuda.install(Path(folder))
    if importlib.util.find_spec("torch") is None:
        return None
    import fake_torch_cuda

    return fake_torch_cuda.install(Path(folder))


def all_kinds() -> Iterator[Any]:
    """The kinds of arrays that there are here; the first is whose versions are told. With
    ONLY=torch there is no cupy, also not for cydist."""
    stand_in()
    if os.environ.get("ONLY") == "torch":
        sys.modules["cupy"] = None  # type: ignore[assignment]
    else:
        yield Cupy()
    # no torch, or one without a GPU
    with contextlib.suppress(ImportError):
        yield Torch()
