"""cydist.init_process_group(torch=True): one job, and both libraries' default groups."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transport_ranks import free_port

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests/interop/torch_shared.py"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
LAUNCHERS = {
    "cydistrun": ["-m", "cydist.run", "--no-prefix", "-n", "2"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(170)]


@pytest.mark.parametrize(
    "launcher", ["cydistrun", pytest.param("torchrun", marks=pytest.mark.more)]
)
def test_torchs_tools_work(launcher: str) -> None:
    """DDP, ZeRO, a sampler, torch.distributed.nn, a mesh, subgroups, a gloo group and objects use
    the same ranks, twice in one process, with calls of cydist's own in between."""
    result = subprocess.run(
        [sys.executable, *LAUNCHERS[launcher], str(PROGRAM), "2"],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    assert sorted(result.stdout.splitlines()) == ["0 used", "1 used"]


@pytest.mark.more
def test_torchs_tools_work_in_ranks_started_by_hand() -> None:
    """Both groups need the one port that MASTER_PORT names."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM)], env=ENVIRONMENT | place | {"RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert said == ["0 used\n", "1 used\n"]


ERRORS = """
import torch.distributed
import cydist

def error(backend):
    try:
        cydist.init_process_group(
            backend, store=cydist.HashStore(), rank=0, world_size=1, torch=True
        )
    except ValueError as error:
        assert not cydist.is_initialized()
        return str(error)

print(error("inproc"))
print(error("mpi"))
torch.distributed.init_process_group(
    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
)
print(error("tcp"))
torch.distributed.destroy_process_group()
print(error("tcp"), torch.distributed.get_backend())
torch.distributed.destroy_process_group()
torch.distributed.init_process_group(
    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
)
cydist.destroy_process_group()
print(torch.distributed.get_backend())
"""


TAKEN = """
import torch.distributed
import cydist

torch.distributed.init_process_group("gloo")
try:
    cydist.init_process_group("tcp", timeout=20)
except cydist.DistNetworkError as error:
    print(error)
"""


@pytest.mark.more
def test_a_port_that_torch_holds_is_named() -> None:
    """In a rank started by hand cydist cannot listen where torch does; it says what to write."""
    port = str(free_port())
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    printed = subprocess.run(
        [sys.executable, "-c", TAKEN], env=ENVIRONMENT | place,
        capture_output=True, text=True, timeout=100, check=True,
    ).stdout  # fmt: skip
    assert printed == (
        f"port {port} of 127.0.0.1 is in use by another process, or by torch.distributed's store "
        "in this one: call cydist.init_process_group('tcp', torch=True) in place of torch's "
        "init_process_group, or give cydist another port (init_method='tcp://host:port')\n"
    )


def test_errors_say_what_to_write() -> None:
    """A backend that cannot share, or torch's default group made earlier, is a ValueError before
    ranks meet, and a later call succeeds. What the program makes in its place stays."""
    printed = subprocess.run(
        [sys.executable, "-c", ERRORS],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=100, check=True,
    ).stdout.splitlines()  # fmt: skip
    assert printed == [
        "init_process_group: torch=True needs backend 'tcp', not 'inproc'. Pass 'tcp', or call "
        "torch.distributed.init_process_group yourself",
        "init_process_group: torch=True needs backend 'tcp', not 'mpi'. Pass 'tcp', or call "
        "torch.distributed.init_process_group yourself",
        "init_process_group: torch=True makes torch's default group, and there is one. Call "
        "torch.distributed.destroy_process_group() first, or leave torch=True out",
        "None cydist",
        "gloo",
    ]


ALONE = """
import torch.distributed
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
import cydist as dist

model = torch.nn.Linear(2, 2)
dist.init_process_group("tcp", timeout=20)
"""
BOTH = "Call cydist.init_process_group('tcp', torch=True)"
NO_DEFAULT = f"""\
ValueError: Default process group has not been initialized, please make sure to call \
init_process_group.
cydist: cydist.init_process_group made cydist's default group, and torch.distributed has none. \
{BOTH} to make both
"""
WRONG_GROUP = f"""\
cydist: this call of torch takes torch's groups only. {BOTH}, and pass \
torch.distributed.group.WORLD or a group of torch.distributed.new_group
"""


@pytest.mark.more
@pytest.mark.parametrize(("call", "end"), [
    ("DistributedDataParallel(model)", NO_DEFAULT),
    ("DistributedSampler(range(4))", NO_DEFAULT),
    ("ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)", NO_DEFAULT),
    ("torch.distributed.new_group([0])", NO_DEFAULT),
    ("DistributedDataParallel(model, process_group=dist.group.WORLD)", WRONG_GROUP),
    ("torch.distributed.all_gather_object([0], 1, group=dist.group.WORLD)", WRONG_GROUP),
    ("torch.distributed.init_process_group('gloo')",
     "name: EADDRINUSE, message: address already in use\n"
     "cydist: cydist's store in this process listens on port {port}. " + BOTH +
     " in place of torch's init_process_group, or give torch another port "
     "(init_method='tcp://host:port', with rank and world_size)\n"),
    ("dist.destroy_process_group(); DistributedSampler(range(4))",
     "please make sure to call init_process_group.\n"),
    ("raise ValueError('of the program')", "ValueError: of the program\n"),
], ids=["ddp", "sampler", "zero", "new_group", "ddp-group", "objects-group", "port", "destroyed",
        "own"])  # fmt: skip
def test_what_torch_raises_without_its_group_is_explained_at_the_end(call: str, end: str) -> None:
    """Below torch's traceback stands what to write; below others, and once cydist has no group,
    nothing does."""
    port = str(free_port())
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    result = subprocess.run(
        [sys.executable, "-c", ALONE + call], env=ENVIRONMENT | place,
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert result.returncode == 1
    assert result.stderr.endswith(end.format(port=port)), result.stderr


def test_torch_takes_another_port_in_ranks_started_by_hand() -> None:
    """What the hint says to write, after cydist's own init_process_group, works."""
    port = str(free_port())
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    url = f"tcp://127.0.0.1:{free_port()}"
    call = (
        f"torch.distributed.init_process_group('gloo', '{url}', rank=0, world_size=1)\n"
        "print(len(list(DistributedSampler(range(4)))), dist.get_backend())\n"
        "torch.distributed.destroy_process_group()\n"
    )
    printed = subprocess.run(
        [sys.executable, "-c", ALONE + call], env=ENVIRONMENT | place,
        capture_output=True, text=True, timeout=100, check=True,
    ).stdout  # fmt: skip
    assert printed == "4 tcp\n"
