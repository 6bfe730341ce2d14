"""torchrun over several hosts starts ranks again: each host's agent counts for itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transport_ranks import free_port

pytest.importorskip("torch.distributed.run")

ROOT = Path(__file__).resolve().parents[2]

# Rank 1 fails as often as it is told, each time while rank 0 computes: then the agent of rank 0
# sees a changed membership, and counts no restart.
PROGRAM = """
import os, sys, time
from pathlib import Path
import numpy as np
import cydist as dist
folder, failures = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("tcp", timeout=40)
x = np.ones(1)
dist.all_reduce(x)
starts = len(list(folder.glob("start.*")))
dist.barrier()
if dist.get_rank() == 1:
    (folder / f"start.{starts}").write_text(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if starts < failures:
        raise RuntimeError(f"failure {starts}")
elif starts < failures:
    time.sleep(60)  # computes, until its agent ends it
dist.barrier()
print("counts", os.environ["TORCHELASTIC_RESTART_COUNT"], "sum", int(x[0]), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.more
@pytest.mark.timeout(170)
def test_ranks_meet_again_after_a_failure_on_one_host(tmp_path: Path) -> None:
    """Two agents, of which one restarts its rank twice and the other follows it."""
    failures = 2
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
        "--max-restarts", "4", "--monitor-interval", "0.2", "--rdzv-backend", "c10d",
        "--rdzv-id", "job", "--rdzv-endpoint", f"127.0.0.1:{free_port()}",
        str(program), str(tmp_path), str(failures),
    ]  # fmt: skip
    agents = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        said = [agent.communicate(timeout=150) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    assert [agent.returncode for agent in agents] == [0, 0], said
    counts = sorted(out.split() for out, _ in said)
    assert [words[2:] for words in counts] == [["sum", "2"]] * 2
    assert counts[0][1] != counts[1][1], "both agents counted alike: nothing was tried"
