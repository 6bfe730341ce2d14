"""A rank of docs/examples/parallel_LIBRARY.py on backend "nccl", over the stand-ins: `LIBRARY`.

torch's tensors are the CPU's, which say that they are on a GPU, and NCCL's calls run at once then.
Prints the losses.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
sys.path.insert(0, str(TESTS / "support"))

from gpu_arrays import share_a_gpu, stand_in  # noqa: E402

import cydist as dist  # noqa: E402

library = sys.argv[1]
share_a_gpu()
tensors = stand_in()
path = TESTS.parent / f"docs/examples/parallel_{library}.py"
spec = importlib.util.spec_from_file_location("example", path)
assert spec is not None
assert spec.loader is not None
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
dist.init_process_group("nccl", timeout=40)
module = importlib.import_module(library)
if library == "torch":
    tensors.tensors_on(0)
    ctypes.CDLL("libnccl.so.2").standin_use_streams(None)
    losses = example.train(module.device("cpu"), 150)
else:
    losses = example.train(module, 40)
sys.stdout.write(json.dumps({"rank": dist.get_rank(), "losses": losses}) + "\n")
dist.destroy_process_group()
