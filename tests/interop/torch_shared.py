"""Rank program: torch's default group that `cydist.init_process_group(torch=True)` makes.

    cydistrun -n 2 tests/interop/torch_shared.py [STARTS]

Each rank uses what torch builds on its default group, STARTS times, and prints what it found.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as torch_dist
import torch.distributed.nn.functional as torch_functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import cydist

warnings.simplefilter("ignore")  # torch.distributed.nn is deprecated
torch.set_num_threads(1)


def ranks_sum() -> float:
    return cydist.get_world_size() * (cydist.get_world_size() - 1) / 2


def use() -> None:
    rank, size = cydist.get_rank(), cydist.get_world_size()
    assert (torch_dist.get_rank(), torch_dist.get_world_size()) == (rank, size)
    assert torch_dist.get_backend() == "cydist"
    assert torch_dist.group.WORLD.host.group_name == "torch"  # as a profile shows it
    net = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    net(torch.full((3, 4), float(rank))).sum().backward()
    optimizer.step()
    weights = net.module.weight.detach()
    mine = weights.clone()
    cydist.broadcast(weights, 0)  # by cydist's own group, between torch's calls
    assert torch.equal(mine, weights)
    assert len(list(DistributedSampler(range(10 * size)))) == 10
    x = torch.tensor([float(rank)], requires_grad=True)
    assert torch_functional.all_reduce(x).item() == ranks_sum()
    mesh = init_device_mesh("cpu", (size,))
    y = torch.tensor([float(rank)])
    torch_dist.all_reduce(y, group=mesh.get_group())
    assert y.item() == ranks_sum()
    pair = torch_dist.new_group([0, 1])
    torch_dist.barrier(pair) if rank < 2 else None
    beside = torch_dist.new_group(backend="gloo")  # meets through torch's store
    torch_dist.all_reduce(y, group=beside)
    every = [None] * size
    torch_dist.all_gather_object(every, rank)
    assert every == [*range(size)]
    z = np.ones(3)
    cydist.all_reduce(z)
    assert z.tolist() == [size] * 3


for start in range(int(sys.argv[1]) if len(sys.argv) > 1 else 1):
    cydist.init_process_group("tcp", timeout=40, torch=True)
    store = torch_dist.distributed_c10d._get_default_store()
    store.set(f"here {cydist.get_rank()}", "yes")
    store.wait([f"here {other}" for other in range(cydist.get_world_size())], timedelta(seconds=20))
    threads = [each.name for each in threading.enumerate() if "connections" in each.name]
    assert len(threads) <= 1, threads  # the links are shared
    use()
    if start:
        torch_dist.destroy_process_group()
    cydist.destroy_process_group()
    assert not torch_dist.is_initialized()
    assert not cydist.is_initialized()
print(os.environ["RANK"], "used", flush=True)
