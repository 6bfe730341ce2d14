"""Rank program: models of DistributedDataParallel that live longer than their group.

    python tests/interop/torch_outliving_model.py STARTS

Each start makes a group, trains, and ends the group while the model exists. With gloo this may
hang: the model then ends the group under Python's lock, for which gloo's threads may wait.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import cydist.interop.torch  # noqa: F401

torch.set_num_threads(1)


def start() -> None:
    dist.init_process_group("cydist", store=dist.HashStore(), rank=0, world_size=1)
    net = DistributedDataParallel(torch.nn.Linear(8, 8))
    for _ in range(2):
        net(torch.ones(3, 8)).sum().backward()
    works = [dist.all_reduce(torch.ones(100_000), async_op=True) for _ in range(4)]
    for work in works:
        work.wait()
    del work, works
    dist.destroy_process_group()


for _ in range(int(sys.argv[1])):
    start()
print("ended", flush=True)
