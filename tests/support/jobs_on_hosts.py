"""Jobs whose ranks are on several hosts, which are namespaces of this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from network_hosts import Host, Process

# The host of each rank
PLACEMENTS = {
    "2+2": [0, 0, 1, 1],
    "round-robin": [0, 1, 0, 1],
    "3+1": [0, 0, 0, 1],
    "2+2+2": [0, 0, 1, 1, 2, 2],
    "1+2+1": [0, 1, 1, 2],
}


@contextmanager
def job_on(
    hosts: Sequence[Host],
    places: Sequence[int],
    command: Sequence[object],
    directory: Path,
    port: int,
    environ: Mapping[str, str] | None = None,
) -> Iterator[list[Process]]:
    """Run a program as a job, whose rank r is on host places[r]; its ranks end afterwards."""
    key = directory / "secret"
    key.write_text("a" * 64)
    key.chmod(0o600)
    common = {"WORLD_SIZE": str(len(places)), "MASTER_ADDR": hosts[places[0]].address,
              "MASTER_PORT": str(port), "CYDIST_SECRET_FILE": str(key),
              **(environ or {})}  # fmt: skip
    with ExitStack() as stack:
        ranks = []
        for rank, place in enumerate(places):
            ranks.append(hosts[place].start(
                list(map(str, command)), {**common, "RANK": str(rank)}
            ))  # fmt: skip
            stack.callback(ranks[-1].end)
        yield ranks
