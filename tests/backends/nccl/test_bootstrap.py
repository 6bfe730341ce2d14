"""How the ranks of a group on GPUs come together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist.backends.nccl.binding import CupyNccl
from cydist.errors import RendezvousError
from cydist.stores import HashStore
from cydist.stores.store import as_bytes
from cydist.testing import run_threads

HERE = Path(__file__).parent


def test_options_on_some_ranks_only_are_refused(gpu_jobs: Any, gpus: Any) -> None:
    """Those that give none would make the group out of the default one's connections, and wait
    there for the others. The next group is made, and its stream may differ from rank to rank."""
    options = dist.ProcessGroupNCCL.Options

    def body(rank: int) -> float:
        with pytest.raises(RendezvousError, match="on rank 0; 'nccl with pg_options' on rank 1"):
            dist.new_group(pg_options=options() if rank else None)
        group = dist.new_group(pg_options=options(is_high_priority_stream=rank == 1))
        array = gpus.array(np.ones(1))
        dist.all_reduce(array, group=group)
        return float(array.get()[0])

    assert gpu_jobs.get(2).run(body) == [2.0, 2.0]


def test_another_backend_on_one_rank_is_refused(gpu_jobs: Any) -> None:
    """Each would wait for the other's ranks."""

    def body(rank: int) -> None:
        with pytest.raises(RendezvousError, match=r"'nccl' on rank 0; 'cpu:tcp,cuda:"):
            dist.new_group([1, 0], backend="cpu:tcp,cuda:nccl" if rank else "nccl")

    gpu_jobs.get(2).run(body)


@pytest.mark.timeout(120)
def test_a_unique_id_travels_through_the_store_only(standins: Path, tmp_path: Path) -> None:
    """All that the ranks of a job write and send is looked through: an id goes to the port of the
    job's store, which lets in nobody without the secret, and comes from it. When all have it the
    store has it no more."""
    ranks, groups = 3, 3
    preloaded, log = tmp_path / "wire.so", tmp_path / "log"
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    subprocess.run(
        ["gcc", *flags, "-o", preloaded, HERE / "fake_nccl_wire.c"], check=True, timeout=60
    )
    command = [sys.executable, "-m", "cydist.run", "--nproc-per-node", str(ranks)]
    result = subprocess.run(
        [*command, str(HERE.parents[1] / "programs/gpu_ids.py")],
        env={
            **os.environ, "STANDIN": str(standins), "PYTHONWARNINGS": "ignore",
            "LD_PRELOAD": str(preloaded), "WIRE_LOG": str(log), "CYDIST_TRANSPORT": "tcp",
        },
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    said = [json.loads(line[line.index("{") :]) for line in result.stdout.splitlines()]
    assert [(each["left"], each["sum"]) for each in said] == [([], [float(ranks**groups)] * 3)] * 3
    store = said[0]["port"]
    ways = [tuple(map(int, line.split())) for line in log.read_text().splitlines()]
    assert len([way for way in ways if way[1] == store]) == groups
    assert len([way for way in ways if way[0] == store]) >= groups * ranks
    assert all(store in way for way in ways)


def test_a_unique_id_is_in_no_store_that_others_can_read(
    gpus: Any, monkeypatch: pytest.MonkeyPatch, secret: bytes
) -> None:
    """It goes over the ranks' own connections there."""
    written: dict[str, bytes] = {}

    class ForeignStore(HashStore):
        in_process = False

        def set(self, key: str, value: Any) -> None:
            written[key] = as_bytes(value)
            super().set(key, value)

    ids: list[bytes] = []
    unique_id = CupyNccl.unique_id

    def recorded(binding: CupyNccl) -> bytes:
        ids.append(unique_id(binding))
        return ids[-1]

    monkeypatch.setattr("cydist.testing.HashStore", ForeignStore)
    monkeypatch.setattr(CupyNccl, "unique_id", recorded)

    def body(rank: int) -> float:
        array = gpus.array(np.ones(1))
        dist.all_reduce(array)
        return float(array.get()[0])

    assert run_threads(body, 2, "nccl") == [2.0, 2.0]
    assert len(ids) == 1
    assert written
    assert not any(ids[0] in value for value in written.values())


def test_what_was_chosen(gpu_jobs: Any) -> None:
    """A group says for logs which NCCL it uses, and how its host group talks."""

    def body(rank: int) -> dict[str, str]:
        group = dist.group.WORLD
        assert group is not None
        return group.for_device("cuda").chosen()

    for chosen in gpu_jobs.get(2).run(body):
        assert chosen["transport"].startswith("NCCL 2.")
        assert chosen["control messages"] == "shared memory"
