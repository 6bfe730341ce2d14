"""A forked child cannot use its parent's groups, and does them no harm."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
import numpy as np
import cydist as dist

dist.init_process_group({backend!r}, rank=0, world_size=1, store=dist.HashStore())
x = np.ones(2)
dist.all_reduce(x)
pid = os.fork()
if pid == 0:
    for call in (dist.all_reduce, dist.isend):
        try:
            call(x, *([] if call is dist.all_reduce else [0]))
        except dist.ForkedError as error:
            assert "forked" in str(error), error
        except ValueError:
            assert call is dist.isend  # to itself: refused before the group is asked
        else:
            os._exit(3)
    dist.destroy_process_group()
    dist.init_process_group("inproc", rank=0, world_size=1, store=dist.HashStore())
    y = np.full(2, 5.0)
    dist.all_reduce(y)
    os._exit(0 if y[0] == 5.0 else 4)
_, status = os.waitpid(pid, 0)
dist.all_reduce(x)
dist.destroy_process_group()
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize("backend", ["tcp", "shm", "inproc"])
def test_a_forked_child_gets_forked_error_and_the_parent_goes_on(backend):
    """The child's call raises; it may leave and join a job of its own; the parent is unharmed."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(backend=backend.replace("shm", "tcp"))],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (0, "") == (done.returncode, done.stderr)
