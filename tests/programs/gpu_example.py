"""A rank of docs/examples/parallel_torch.py on backend "nccl", over the stand-in.

Its tensors are the CPU's, which say that they are on a GPU, and calls run at once. Prints the
losses.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
sys.path.insert(0, str(TESTS))

from gpu_arrays import Standin, StandinTensors  # noqa: E402

import cydist as dist  # noqa: E402

standin = Standin(os.environ["STANDIN"])
standin.run_at_once()
torch = StandinTensors(standin).torch
path = TESTS.parent / "docs/examples/parallel_torch.py"
spec = importlib.util.spec_from_file_location("example", path)
assert spec is not None
assert spec.loader is not None
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
dist.init_process_group("nccl", timeout=40)
losses = example.train(torch.device("cpu"), 150)
sys.stdout.write(json.dumps({"rank": dist.get_rank(), "losses": losses}) + "\n")
dist.destroy_process_group()
