"""Dumps in torch's format: torch's own analyser reads them, and finds what is wrong in a job."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DEADLINE = 55.0
PROGRAM = """import os, sys, numpy as np, cydist as dist
rank = int(os.environ['RANK'])
dist.init_process_group('tcp', timeout=30)
for _ in range(2):
    dist.all_reduce(np.ones(4))
dist.broadcast(np.ones(2, 'f4'), 0)
dist.send(np.ones(1), 1) if rank == 0 else dist.recv(np.ones(1), 0)
dist.scan(np.ones(1))
{more}
dist.destroy_process_group()
"""
# What `torchfrtrace` does, and the calls that it matched.
ANALYSER = """
from torch.distributed.flight_recorder.components.builder import build_db
from torch.distributed.flight_recorder.components.config_manager import JobConfig
from torch.distributed.flight_recorder.components.loader import read_dir
args = JobConfig().parse_args(None)
details, version = read_dir(args)
for call in build_db(details, args, version).collectives:
    print(call.collective_name, call.pass_check)
"""
# What rank 1 does besides the calls that match, and what the analyser says of it.
WRONG = {
    "nothing": ("", None),
    "another-call": (
        "dist.barrier() if rank == 0 else dist.all_reduce(np.ones(4))", "COLLECTIVE_TYPE_MISMATCH",
    ),
    "another-size": ("dist.all_reduce(np.ones(4 + rank))", "SIZE_OR_SYNTAX_MISMATCH"),
    "no-call": (
        "dist.barrier() if rank == 0 else os._exit(3)", r"missing ranks: \{1\}|Not all",
    ),
}  # fmt: skip


def run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=DEADLINE,
        env={**os.environ, **env}, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_torchs_analyser_reads_them(tmp_path: Path, what: str) -> None:
    """Of a job of two ranks, after which each has left its calls."""
    more, expected = WRONG[what]
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(more=more))
    dumps, out = tmp_path / "dumps", tmp_path / "torch"
    job = run("-m", "cydist.run", "-n", "2", str(program), CYDIST_RECORDER=str(dumps))
    assert (job.returncode == 0) == (what == "nothing"), job.stderr
    done = run("-m", "cydist.recorder", "export", str(dumps), str(out))
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(out)) == ["rank_0", "rank_1"]
    found = run("-c", ANALYSER, str(out), "-p", "rank_")
    said = found.stdout + found.stderr
    assert found.returncode == 0, said
    if expected is None:
        assert "MISMATCH" not in said
        assert "missing" not in said
    else:
        assert re.search(expected, said), said
    matched = [line for line in found.stdout.splitlines() if line.endswith(" True")]
    assert matched[:4] == [
        "gloo:all_reduce True", "gloo:all_reduce True", "gloo:broadcast True", "gloo:send 0->1 True"
    ], said  # fmt: skip


def test_a_directory_without_dumps(tmp_path: Path) -> None:
    """Said in a sentence, as is a file that is no dump."""
    done = run("-m", "cydist.recorder", "export", str(tmp_path), str(tmp_path / "out"))
    assert (done.returncode, "has no dump of a rank" in done.stderr) == (1, True)
    (tmp_path / "rank-0.json").write_text('{"format": "other"}')
    done = run("-m", "cydist.recorder", "export", str(tmp_path), str(tmp_path / "out"))
    assert "is no dump of cydist's recorder" in done.stderr
    (tmp_path / "rank-0.json").write_text('{"format": "cydist-recorder", "version": 9}')
    done = run("-m", "cydist.recorder", "export", str(tmp_path), str(tmp_path / "out"))
    assert "has version 9 of the recorder's format" in done.stderr
