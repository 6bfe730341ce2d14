"""A rank in a container: says whether it shares memory, and that the calls are right."""

import numpy as np

import cydist as dist
from cydist import _native

dist.init_process_group("tcp", timeout=60)
rank, size = dist.get_rank(), dist.get_world_size()
for count in (1, 100_000, 3_000_000):
    data = np.full(count, rank + 1)
    dist.all_reduce(data)
    assert (data == size * (size + 1) // 2).all()
    dist.broadcast(data, 0)
found = [None] * size
dist.all_gather_object(found, {"rank": rank, "values": np.arange(rank)})
assert [each["rank"] for each in found] == list(range(size))
if rank == 0:
    dist.send(np.arange(500_000), 1)
elif rank == 1:
    got = np.zeros(500_000, np.int64)
    dist.recv(got, 0)
    assert (got == np.arange(500_000)).all()
shared = isinstance(dist.group.WORLD._endpoint.link, _native.ShmLink)
print(f"rank {rank} is right, over {'memory' if shared else 'sockets'}", flush=True)
dist.destroy_process_group()
