"""Whole programs on torch's backend "cydist": how torch finds it, and the example."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from transport_ranks import free_port

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs/examples/ddp.py"


def run(command: list[str], **environ: str) -> str:
    """What a program prints."""
    result = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environ,
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    return result.stdout


def test_torch_finds_it_by_itself(tmp_path: Path) -> None:
    """The entry point makes the name known without importing cydist, until a group is made."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [(name, target)] = project["entry-points"]["torch.backends"].items()
    installed = tmp_path / "cydist_of_this_test-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: cydist_of_this_test\nVersion: 1\n")
    (installed / "entry_points.txt").write_text(f"[torch.backends]\n{name} = {target}\n")
    program = (
        "import sys, torch, torch.distributed as dist\n"
        "print('cydist' in sys.modules, dist.is_backend_available('cydist'))\n"
        "dist.init_process_group('cydist', store=dist.HashStore(), rank=0, world_size=1)\n"
        "import cydist\n"
        "print(dist.get_backend(), type(dist.group.WORLD).__name__, cydist.is_initialized())\n"
        "dist.destroy_process_group()\n"
    )
    printed = run(["-c", program], PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert printed.splitlines() == ["False True", "cydist Group False"]


def test_devices_are_those_of_torchs_string() -> None:
    """A group is for the devices that init_process_group gave to cydist, and for the CPU."""
    program = (
        "import torch.distributed as dist, cydist.interop.torch\n"
        "for backend in ('cydist', 'cpu:cydist,cuda:nccl'):\n"
        "    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)\n"
        "    print(*dist.group.WORLD._device_types)\n"
        "    dist.destroy_process_group()\n"
    )
    assert run(["-c", program]).splitlines() == ["cpu cuda", "cpu"]


@pytest.mark.more
def test_a_rank_with_another_secret_is_refused(tmp_path: Path) -> None:
    """A rank that reaches torch's store and does not know the job's secret does not join."""
    program = (
        "import torch.distributed as dist, cydist.interop.torch\n"
        "from datetime import timedelta\n"
        "dist.init_process_group('cydist', timeout=timedelta(seconds=4))\n"
    )
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=os.environ
            | place
            | {"RANK": str(rank), "XDG_STATE_HOME": str(tmp_path / str(rank))}
            | {"PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=50)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert "RendezvousError: rendezvous: timeout with 1 of 2 ranks here" in said[0]
    assert "AuthenticationError" in said[1]


@pytest.mark.slow
@pytest.mark.more
@pytest.mark.timeout(170)
def test_the_example_compares_backends() -> None:
    """docs/examples/ddp.py trains under torchrun on two backends and prints how fast each is."""
    pytest.importorskip("sklearn")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    printed = run([*launch, str(EXAMPLE), "--beside", "gloo", "--epochs", "1", "--steps", "3"])
    assert re.search(r"^epoch  1/1  loss \d\.\d+  test accuracy", printed, re.M)
    for backend in ("cydist", "gloo"):
        assert re.search(rf"^{backend}: [\d.]+ steps/s, all_reduce .* in [\d.]+ us$", printed, re.M)
    assert re.search(r"^cydist is [\d.]+ times as fast in steps, \d+ times in", printed, re.M)


@pytest.mark.slow
@pytest.mark.more
@pytest.mark.timeout(170)
def test_the_example_learns() -> None:
    """docs/examples/ddp.py recognizes 95 % of the digits on cydist, or its exit code is 1."""
    pytest.importorskip("sklearn")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert "epoch 20/20" in run([*launch, str(EXAMPLE)])


PROGRAM = """
import os, sys
import numpy as np
import torch
import torch.distributed
import cydist

def cydists():
    cydist.init_process_group(timeout=60)
    x = np.ones(3)
    cydist.all_reduce(x)
    return x.tolist()

def torchs(backend):
    torch.distributed.init_process_group(backend)
    x = torch.ones(3)
    torch.distributed.all_reduce(x)
    return x.tolist()

def main(*orders):
    sums = [cydists() if name == "own" else torchs(name) for name in orders]
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if cydist.is_initialized():
        cydist.destroy_process_group()
    sys.stdout.write(f"{os.environ['RANK']} {sums}\\n")

def rank(i, orders):
    main(*orders)

if __name__ == "__main__":
    how, *orders = sys.argv[1:]
    main(*orders) if how == "cydistrun" else cydist.spawn(rank, (orders,), nprocs=2)
"""


@pytest.mark.more
@pytest.mark.parametrize(
    ("how", "orders"),
    [
        ("cydistrun", "own gloo"),
        ("cydistrun", "gloo own"),
        ("cydistrun", "own cydist"),
        ("cydistrun", "cydist own"),
        ("spawn", "own gloo"),
        ("spawn", "gloo own"),
    ],
)
def test_cydists_store_and_torchs_have_ports_of_their_own(
    tmp_path: Path, how: str, orders: str
) -> None:
    """One program may have groups of cydist's and of torch's, made in any order."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    start = ["-m", "cydist.run", "-n", "2"] if how == "cydistrun" else []
    printed = run([*start, str(program), how, *orders.split()])
    sums = [[2.0] * 3 for _ in orders.split()]
    labels = [f"[{rank}] " if how == "cydistrun" else "" for rank in range(2)]
    expected = [f"{label}{rank} {sums}" for rank, label in enumerate(labels)]
    assert sorted(printed.splitlines()) == expected
