"""A rank that makes groups on GPUs, over the stand-in; prints the store's port and what is left of
their unique ids in it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import numpy as np
from gpu_arrays import all_kinds, share_a_gpu

import cydist as dist
from cydist.api import process_groups

share_a_gpu()
kind = next(all_kinds())
dist.init_process_group("nccl", timeout=40)
array = kind.array(np.ones(3))
options = dist.ProcessGroupNCCL.Options()  # a group with options is not split off the default one
others = (
    dist.new_group(pg_options=options),
    dist.new_group(None, None, "cpu:tcp,cuda:nccl", options),
)
for group in (None, *others):
    dist.all_reduce(array, group=group)
dist.barrier()
left = [key for key in process_groups.current_world().store.list_keys() if key.endswith("/id/0")]
port = int(os.environ["CYDIST_STORE_PORT"].split()[0])
said = {"port": port, "left": left, "sum": kind.get(array).tolist()}
sys.stdout.write(json.dumps(said) + "\n")
dist.destroy_process_group()
