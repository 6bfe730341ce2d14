"""Train the digits on three ranks, of which one dies: the others go on without it.

    cydistrun --keep-going --nproc-per-node 3 docs/examples/survive.py

After two epochs rank 1 is killed. The error on the others names it; `shrink_group` makes a group of
those that are left, which agree on the model and train to the end. Exits with 1 if the replicas
differ or the test accuracy is below 95 %; the launcher ends with 137, as rank 1 did.
"""

from __future__ import annotations

import os
import signal
import sys

from digits import WANTED_ACCURACY, NumpyModel, load_digits, replica_digests, train

import cydist as dist

EPOCHS, LAST_TOGETHER = 8, 2
LEAVES = 1  # the rank that dies


def main() -> int:
    """Run a rank, and return the exit code."""
    digits, model = load_digits(), NumpyModel()
    dist.init_process_group("tcp", timeout=60)
    train(model, digits, LAST_TOGETHER, dist.get_rank(), dist.get_world_size())
    if dist.get_rank() == LEAVES:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        train(model, digits, EPOCHS, dist.get_rank(), dist.get_world_size(), LAST_TOGETHER)
    except dist.PeerFailedError as error:
        print(f"  {type(error).__name__}: {error}", flush=True)
    dist.shrink_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    print(f"  now rank {rank} of {size}", flush=True)
    for array in model.state():  # one may have made a step that the other has not
        dist.broadcast(array, src=0)
    history = train(model, digits, EPOCHS, rank, size, LAST_TOGETHER)
    equal = len(set(replica_digests(model))) == 1
    if rank == 0:
        print(
            f"  replicas are {'equal' if equal else 'different'} after the death of rank {LEAVES}"
        )
    dist.barrier()
    dist.destroy_process_group()
    return 0 if equal and history.accuracies[-1] >= WANTED_ACCURACY else 1


if __name__ == "__main__":
    sys.exit(main())
