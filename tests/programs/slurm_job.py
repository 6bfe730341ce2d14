"""A job of Slurm: every rank says where it is, and the sum of all ranks."""

import os
import sys

import numpy as np

import cydist as dist

attempt, rank = os.environ.get("SLURM_RESTART_COUNT", "0"), os.environ["SLURM_PROCID"]
if "fails first" in sys.argv and (attempt, rank) == ("0", "1"):
    sys.exit("rank 1 fails before it has met the others")
if "apart" in sys.argv:
    os.environ["XDG_STATE_HOME"] = f"{os.environ['HOME']}/{os.uname().nodename}"
dist.init_process_group("tcp", timeout=60)
ranks = np.array([dist.get_rank()])
dist.all_reduce(ranks)
hosts = [None] * dist.get_world_size()
dist.all_gather_object(hosts, os.uname().nodename)
where = f"rank {dist.get_rank()} of {dist.get_world_size()}"
# In one write: torchrun's ranks share one stdout, and print writes the end of a line by itself.
sys.stdout.write(f"{where}: sum {ranks[0]}, on {' '.join(hosts)}\n")
dist.destroy_process_group()
