"""A rank whose groups on a GPU come and go, over the stand-in; prints how much scratch memory
cupy's pool still keeps for each group's stream after its end."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import numpy as np
from gpu_arrays import all_kinds, share_a_gpu

import cydist as dist

share_a_gpu()
kind = next(all_kinds())
dist.init_process_group("nccl", timeout=40)
pool = importlib.import_module("cupy").get_default_memory_pool()
array = kind.array(np.ones(1 << 20, np.int16))  # widened in scratch memory
before = pool.total_bytes()
kept = []
for _ in range(3):
    group = dist.new_group()
    work = dist.all_reduce(array, group=group, async_op=True)
    assert work is not None
    work.synchronize()
    del work
    during = pool.total_bytes()
    dist.destroy_process_group(group)
    kept.append(pool.total_bytes() - before)
said = {"rank": int(os.environ["RANK"]), "scratch": during - before, "kept": kept}
sys.stdout.write(json.dumps(said) + "\n")
dist.destroy_process_group()
