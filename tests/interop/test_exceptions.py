"""cydist's exceptions are also torch.distributed's of the same names, where that is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch.distributed

import cydist as dist

BASES = ["DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "QueueEmptyError"]
KINDS: dict[type[dist.DistError], str] = {
    dist.DistError: "DistError",
    dist.DistBackendError: "DistBackendError",
    dist.MismatchError: "DistBackendError",
    dist.UnsupportedError: "DistBackendError",
    dist.DistNetworkError: "DistNetworkError",
    dist.PeerFailedError: "DistNetworkError",
    dist.RendezvousError: "DistNetworkError",
    dist.DistStoreError: "DistStoreError",
    dist.StoreTimeoutError: "DistStoreError",
    dist.QueueEmptyError: "QueueEmptyError",
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_torchs_class_catches(kind: type[dist.DistError]) -> None:
    """As torch.distributed's own code, and libraries written for it, catch errors."""
    with pytest.raises(getattr(torch.distributed, KINDS[kind])) as caught:
        raise kind("cut")
    assert type(caught.value) is kind
    assert str(caught.value) == "cut"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_torchs_other_classes_do_not_catch(kind: type[dist.DistError]) -> None:
    """Only the class of the name, and torch's bases of it."""
    named = getattr(torch.distributed, KINDS[kind])
    for name in BASES:
        theirs = getattr(torch.distributed, name)
        assert isinstance(kind("cut"), theirs) == issubclass(named, theirs)


def test_torch_imported_later() -> None:
    """Errors raised from then on are torch's too; before, torch is not needed."""
    code = (
        "import sys, cydist as dist\n"
        "try: dist.FileStore('/proc/no/store', 1).get('k')\n"
        "except dist.DistError: assert 'torch' not in sys.modules\n"
        "import torch.distributed\n"
        "try: dist.HashStore().queue_pop('q', block=False)\n"
        "except torch.distributed.QueueEmptyError as error: print(type(error).__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "QueueEmptyError\n"
