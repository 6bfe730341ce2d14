"""cydist.rendezvous: a function, at all times, which meets and makes no group."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from thread_rendezvous import WAIT, stand_alone

import cydist as dist
from cydist.testing import run_threads


@pytest.fixture
def url(secret: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Where two ranks meet, without a launcher."""
    stand_alone(monkeypatch, tmp_path)
    return f"file://{tmp_path}/meeting"


def test_ranks_meet(url: str) -> None:
    """Each gets the one triple; the stores are one."""

    def body(rank: int) -> bytes:
        store, here, size = next(dist.rendezvous(url, rank, 2, timeout=timedelta(seconds=WAIT)))
        assert (here, size) == (rank, 2)
        store.set(f"from {rank}", f"{rank}")
        return store.get(f"from {1 - rank}")

    assert run_threads(body, 2, "inproc") == [b"1", b"0"]


def test_a_group_of_what_it_gives(url: str) -> None:
    """The triple goes to init_process_group, in a process for each rank."""
    program = (
        "import sys, numpy as np, cydist as dist\n"
        "met = dist.rendezvous(sys.argv[1], int(sys.argv[2]), 2, timeout=30)\n"
        "store, rank, size = next(met)\n"
        "dist.init_process_group('tcp', store=store, rank=rank, world_size=size)\n"
        "x = np.array([rank + 1])\n"
        "dist.all_reduce(x)\n"
        "print(int(x[0]), callable(dist.rendezvous))\n"
        "dist.destroy_process_group()\n"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, url, str(rank)], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=2 * WAIT)[0] for rank in ranks] == ["3 True\n"] * 2


@pytest.mark.parametrize("name", ["rendezvous", "register_rendezvous_handler"])
def test_both_are_imported_as_from_torch(name: str) -> None:
    """`from torch.distributed.rendezvous import ...`, after changing the name of the package."""
    from cydist import rendezvous as function

    made: dict[str, Any] = {}
    exec(f"from cydist.rendezvous import {name}", made)
    assert made[name] is getattr(dist, name)
    assert function is dist.rendezvous


def test_a_wrong_url_is_an_error_of_the_call() -> None:
    """Before the triple is taken, as in torch."""
    with pytest.raises(TypeError, match="url must be a string such as 'env://', not 3"):
        dist.rendezvous(3)  # type: ignore[arg-type]


def test_an_unknown_scheme() -> None:
    """Is an error of the call too."""
    with pytest.raises(ValueError, match="init_method must begin with"):
        dist.rendezvous("pigeon://roof")


def test_it_stays_a_function(url: str) -> None:
    """Also once its package's modules have been imported by a job."""
    x = np.ones(1)
    run_threads(lambda rank: dist.all_reduce(x.copy()), 2, "tcp")
    assert "cydist.rendezvous.handlers" in sys.modules
    assert callable(dist.rendezvous)
