"""How long a receive takes on a rank, one of whose other threads tests a message in a loop.

    PYTHONPATH=tests/support python tests/programs/wake_up_time.py

Two ranks as threads of this process exchange 300 short messages over sockets, and over shared
memory. Milliseconds: the median and the mean of a receive, the longest, and how many took more than
15 ms, as one that is not woken does.
"""

import statistics
import threading
import time

import numpy as np
from transport_ranks import Ranks, soon

MESSAGES = 300
PING, PONG, LAST = 1, 2, 3


def receives(transport: str) -> list[float]:
    world = Ranks(transport, 2)
    here, there = world.group()
    over = threading.Event()

    def test_in_a_loop() -> None:
        message = here.irecv(np.zeros(1), 1, LAST)
        while not over.is_set():
            message.test()
        assert message.wait(soon())

    def answer() -> None:
        for _ in range(MESSAGES):
            assert there.isend(np.zeros(1), 0, PING).wait(soon())
            assert there.irecv(np.zeros(1), 0, PONG).wait(soon())

    threads = [threading.Thread(target=body) for body in (test_in_a_loop, answer)]
    for thread in threads:
        thread.start()
    taken = []
    for _ in range(MESSAGES):
        began = time.perf_counter()
        assert here.irecv(np.zeros(1), 1, PING).wait(soon())
        taken.append(1e3 * (time.perf_counter() - began))
        assert here.isend(np.zeros(1), 1, PONG).wait(soon())
    over.set()
    assert there.isend(np.zeros(1), 0, LAST).wait(soon())
    for thread in threads:
        thread.join()
    world.close()
    return taken


for transport in ("tcp", "shm"):
    taken = receives(transport)
    late = sum(each > 15 for each in taken)
    print(
        f"{transport}: median {statistics.median(taken):.3f}, mean {statistics.mean(taken):.3f}, "
        f"longest {max(taken):.1f} ms, {late} of {MESSAGES} late"
    )
