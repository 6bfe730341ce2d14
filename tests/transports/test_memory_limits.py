"""Limits of a cgroup count as much as the host's memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cydist._native import cgroup_left

MIB = 1 << 20


def tree(root: Path, lines: str, files: dict[str, object]) -> str:
    """A made-up system: what /proc/self/cgroup says, and files below /sys/fs/cgroup."""
    for name, content in {"proc/self/cgroup": lines, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return str(root)


def test_the_second_version(tmp_path: Path) -> None:
    """The smallest on the way up counts, with the files' memory that the kernel may take back."""
    top = "sys/fs/cgroup"
    root = tree(
        tmp_path, "0::/slurm/job/step",
        {
            f"{top}/slurm/memory.max": "max", f"{top}/slurm/memory.current": 5 * MIB,
            f"{top}/slurm/job/memory.max": 400 * MIB,
            f"{top}/slurm/job/memory.current": 350 * MIB,
            f"{top}/slurm/job/memory.stat": f"anon 1\ninactive_file {30 * MIB}\nactive_file 7",
            f"{top}/slurm/job/step/memory.max": 900 * MIB,
            f"{top}/slurm/job/step/memory.current": 100 * MIB,
            f"{top}/slurm/job/step/memory.stat": "inactive_file 0",
        },
    )  # fmt: skip
    assert cgroup_left(root) == 80 * MIB


@pytest.mark.parametrize("path", ["docker/abc", ""], ids=["host's", "container's"])
def test_the_first_version(tmp_path: Path, path: str) -> None:
    """A container may see its own limit at the top, under the path that the host gave it."""
    place = f"sys/fs/cgroup/memory/{path}".rstrip("/")
    root = tree(
        tmp_path, "3:cpu,cpuacct:/x\n2:memory:/docker/abc\n0::/",
        {
            f"{place}/memory.limit_in_bytes": 400 * MIB,
            f"{place}/memory.usage_in_bytes": 390 * MIB,
            f"{place}/memory.stat": f"inactive_file 1\ntotal_inactive_file {2 * MIB}",
        },
    )  # fmt: skip
    assert cgroup_left(root) == 12 * MIB


def test_no_limit(tmp_path: Path) -> None:
    """Without cgroups, and without a limit in them, nothing bounds."""
    assert cgroup_left(str(tmp_path)) >= 1 << 60
    root = tree(
        tmp_path, "2:memory:/", {"sys/fs/cgroup/memory/memory.limit_in_bytes": (1 << 63) - 4096}
    )
    assert cgroup_left(root) >= 1 << 60


def test_empty_shared_and_objects_ask() -> None:
    """An array beyond the limit is a MemoryError, and objects beyond it are refused."""
    code = (
        "import os, numpy as np, cydist as dist\n"
        "from cydist.api import objects\n"
        "from cydist._native import shm_heap\n"
        "dist.init_process_group('tcp', rank=0, world_size=1, store=dist.HashStore())\n"
        "objects.cgroup_left = lambda: 1 << 25\n"
        "try: objects._blocks('x', [1 << 26], [0], dist.group.WORLD)\n"
        "except dist.DistBackendError as e: print('cgroup' in str(e))\n"
        "print(shm_heap.available() <= shm_heap.cgroup_left())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split() == ["True", "True"], done.stderr
