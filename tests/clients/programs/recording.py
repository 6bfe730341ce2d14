"""Everything that a rank of a program here computes, saved for a comparison, and its speed.

A program is started as `torchrun --nproc-per-node 2 PROGRAM FOLDER BACKEND`, Ray's without
torchrun, and saves FOLDER/RANK.pt. All tensors are made from fixed seeds.
"""

from __future__ import annotations

import atexit
import dataclasses
import faulthandler
import os
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

SECONDS = 150  # until a rank that still runs prints its stacks and ends
STEPS = 40
ROWS = 16  # of a batch
FEATURES, HIDDEN, CLASSES = 64, 256, 10
# Kept until the process ends. If a model of DistributedDataParallel has the last reference to
# gloo's group, it ends the group while it holds Python's lock: it joins gloo's threads, and one of
# them may wait for that lock to free a tensor. The process then hangs (torch 2.13).
gloo_groups: list[object] = []


def end_at_once() -> None:
    """End this process before Python does: one of gloo's threads that waits for Python's lock then
    would end it by SIGABRT (torch 2.13)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class Recording:
    """Tensors of a rank by name, and the times of its steps."""

    def __init__(self, folder: str | Path, backend: str, rank: int | None = None) -> None:
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        torch.set_num_threads(1)  # ranks share the cores
        torch.manual_seed(7)
        self.folder, self.backend = Path(folder), backend
        self.rank = int(os.environ["RANK"]) if rank is None else rank
        self.tensors: dict[str, torch.Tensor] = {}
        self.ends: list[float] = []

    def step_ends(self) -> None:
        """Note the time."""
        self.ends.append(time.perf_counter())

    def keep(self, name: str, value: Any) -> None:
        """Copy all tensors and numbers in a value."""
        if isinstance(value, torch.Tensor):
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            found = whole.detach().cpu().clone()
        elif isinstance(value, bool | int | float):
            found = torch.tensor(value)
        elif isinstance(value, str):
            found = torch.tensor(list(value.encode()))
        else:
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                value = vars(value)
            pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
            for key, each in pairs:
                if each is not None:
                    self.keep(f"{name}.{key}", each)
            return
        assert name not in self.tensors, f"{name} was kept before"
        self.tensors[name] = found

    def save(self) -> None:
        """Write the tensors and the steps per second of the median step."""
        if self.backend == "gloo":
            gloo_groups.append(torch.distributed.group.WORLD)
            atexit.register(end_at_once)
        assert torch.distributed.get_backend() == self.backend
        steps = [after - before for before, after in zip(self.ends, self.ends[1:], strict=False)]
        rate = 1 / statistics.median(steps) if steps else 0.0
        torch.save({"tensors": self.tensors, "rate": rate}, self.folder / f"{self.rank}.pt")


def from_command_line() -> Recording:
    """Return the recording that the command line names."""
    return Recording(sys.argv[1], sys.argv[2])


def network() -> torch.nn.Sequential:
    """Return a classifier with the same parameters on all ranks."""
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, HIDDEN),
        torch.nn.ReLU(),
        torch.nn.BatchNorm1d(HIDDEN),
        torch.nn.Linear(HIDDEN, CLASSES),
    )


def examples(count: int, seed: int = 1) -> torch.utils.data.TensorDataset:
    """Return random rows, and labels that depend on them."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, FEATURES, generator=generator)
    return torch.utils.data.TensorDataset(rows, rows[:, :CLASSES].argmax(1))
