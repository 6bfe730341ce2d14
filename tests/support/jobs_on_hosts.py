"""Jobs whose ranks are on several hosts, which are namespaces of this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from network_hosts import ROOT, Host, Process

# The host of each rank
PLACEMENTS = {
    "2+2": [0, 0, 1, 1],
    "round-robin": [0, 1, 0, 1],
    "3+1": [0, 0, 0, 1],
    "2+2+2": [0, 0, 1, 1, 2, 2],
    "1+2+1": [0, 1, 1, 2],
    "1+1+1": [0, 1, 2],
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


# Starts an MPI's daemon on a host: AGENT [OPTION ...] ADDRESS COMMAND ... UCX, below MPICH, finds
# a host's interfaces in /sys, and the host has none of its own. Open MPI's daemon refuses to start
# where another one with its process id has left files, and hosts have the same process ids.
AGENT = """#!/bin/sh
while :; do case "$1" in -*) shift ;; *) break ;; esac; done
case "$1" in
{cases}
esac
shift
export TMPDIR=$(mktemp -d {directory}/XXXXXX)
exec $enter unshare --mount sh -c "mount -t sysfs sysfs /sys && cd {root} && $*"
"""


def mpirun_on(
    python: str,
    hosts: Sequence[Host],
    places: Sequence[int],
    program: Sequence[object],
    environ: Mapping[str, str],
    directory: Path,
) -> list[str]:
    """Return the command that runs a program by the MPI beside an interpreter, Open MPI or MPICH,
    on all hosts but the last, which mpirun needs."""
    *hosts, launcher = hosts
    agent = directory / "agent"
    cases = "\n".join(f"{each.address}) enter='{' '.join(each.enter())}' ;;" for each in hosts)
    agent.write_text(AGENT.format(cases=cases, root=ROOT, directory=directory))
    agent.chmod(0o700)
    machines = directory / "machines"
    machines.write_text("".join(f"{hosts[place].address}\n" for place in places))
    # Lines that are buffered are written in one piece, which Hydra passes on as it comes.
    passed = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}", "CYDIST_TUNING": "off",
              "PYTHONUNBUFFERED": "", **environ}  # fmt: skip
    binaries = Path(python).parent
    if (binaries / "hydra_pmi_proxy").exists():
        options = ["-launcher", "ssh", "-launcher-exec", str(agent), "-f", str(machines),
                   "-localhost", launcher.address,
                   *(part for pair in passed.items() for part in ("-genv", *pair))]  # fmt: skip
    else:
        options = [
            "--allow-run-as-root", "--hostfile", str(machines), "--map-by", "seq:oversubscribe",
            "--bind-to", "none", "--prtemca", "plm_ssh_agent", str(agent),
            "--prtemca", "prte_if_include", "eth", "--mca", "btl_tcp_if_include", "eth",
            "--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp",
            "--mca", "mpi_yield_when_idle", "1",
            *(part for name, value in passed.items() for part in ("-x", f"{name}={value}")),
        ]  # fmt: skip
    return [*launcher.in_network(), str(binaries / "mpirun"), *options, "-n", str(len(places)),
            python, *map(str, program)]  # fmt: skip
