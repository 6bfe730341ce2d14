"""The rank that serves the store may block in code that holds Python's lock after the start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cydist.errors import StoreTimeoutError
from cydist.stores import HashStore, MembershipStore

# After the start, rank 0 waits for the others in one C call that holds Python's lock, as MPI_Init
# does. The others take their time for each request to the store.
PROGRAM = """
import ctypes, os, sys, time
import cydist as dist
from cydist.stores import TCPStore

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if rank:
    def slowly(*arguments, exchange=TCPStore._exchange):
        time.sleep(0.05)
        return exchange(*arguments)
    TCPStore._exchange = slowly
dist.init_process_group("tcp", timeout=60)
pipe = os.open(sys.argv[1], os.O_RDWR)
if rank == 0:
    for _ in range(size - 1):
        assert ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1) == 1
else:
    os.write(pipe, b"x")
dist.barrier()
dist.destroy_process_group()
"""


def test_rank_0_may_block_with_pythons_lock_after_the_start(tmp_path: Path) -> None:
    """init_process_group returns on rank 0 when no other rank needs its store any more."""
    program, pipe = tmp_path / "program.py", tmp_path / "pipe"
    program.write_text(PROGRAM)
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "cydist.run", "--nproc-per-node", "3", program, pipe]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


def test_the_rank_that_does_not_finish_its_start_is_named() -> None:
    """The server's rank waits until its timeout, and says for which rank."""
    store = HashStore()
    ranks = [MembershipStore("start", store, range(3), holder=0) for _ in range(2)]
    ranks[1].let_server_leave_last(1, 3)
    ranks[0].set_timeout(0.1)
    with pytest.raises(StoreTimeoutError, match=r"timeout after 0\.1 s, rank 2 did not come"):
        ranks[0].let_server_leave_last(0, 3)
