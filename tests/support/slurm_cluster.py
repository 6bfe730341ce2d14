"""A Slurm cluster on two hosts of this machine (network_hosts.py), without cgroups or systemd."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from network_hosts import DEADLINE, Host, Network, network_of, why_none

ROOT = Path(__file__).resolve().parents[2]
DAEMONS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol")

OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}  # states

CONFIGURATION = """
ClusterName=test
SlurmctldHost=host0
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={0}/state
SlurmdSpoolDir={0}/spool-%n
SlurmctldPidFile={0}/slurmctld.pid
SlurmdPidFile={0}/slurmd-%n.pid
SlurmctldLogFile={0}/slurmctld.log
SlurmdLogFile={0}/slurmd-%n.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
NodeName=host[0-1] CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_no_slurm() -> str:
    """Return why no cluster can be made here; "" if one can."""
    missing = [name for name in DAEMONS if shutil.which(name) is None]
    return f"no {', '.join(missing)}" if missing else why_none()


class Cluster:
    """A controller on host 0, and a daemon on each host, that share this machine's files.

    Attributes:
        home: The home of the user on both hosts.
        environ: What programs of Slurm need, and ranks.
    """

    def __init__(self, network: Network, hosts: list[Host], directory: Path) -> None:
        self.home = directory / "home"
        self.hosts = hosts
        self._directory = directory
        for name in ("home", "state", "spool-host0", "spool-host1"):
            (directory / name).mkdir()
        configuration = directory / "slurm.conf"
        configuration.write_text(CONFIGURATION.format(directory))
        programs = Path(sys.executable).parent
        self.environ = {
            "SLURM_CONF": str(configuration), "HOME": str(self.home), "LANG": "C",
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}", "CYDIST_TUNING": "off",
        }  # fmt: skip
        network.name_hosts(hosts)
        self._daemons = [self._start(hosts[0], "slurmctld", "-D")]
        self._daemons += [self._start(host, "slurmd", "-D") for host in hosts]
        self._await(lambda: self.on(hosts[0], "sinfo", "-h", "-o", "%T %D") == "idle 2\n", "idle")

    def _start(self, host: Host, *command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            host.enter(*command), env=self.environ, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def on(self, host: Host, *command: str) -> str:
        """Run a command on a host, and return what it wrote to stdout."""
        done = subprocess.run(
            host.enter(*command), env=self.environ, capture_output=True, text=True,
            timeout=DEADLINE, check=False,
        )  # fmt: skip
        return done.stdout

    def _await(self, condition: object, what: str, seconds: float = DEADLINE) -> None:
        end = time.monotonic() + seconds
        while not condition():  # type: ignore[operator]
            assert time.monotonic() < end, f"not {what} after {seconds} s: {self.logs()}"
            time.sleep(0.1)

    def logs(self) -> str:
        """Return the last lines of the daemons' logs."""
        logs = sorted(self._directory.glob("*.log"))
        return "\n".join(f"{log.name}: {''.join(log.read_text()[-1500:])}" for log in logs)

    def submit(self, *command: str) -> str:
        """Submit a batch script on host 0, and return the job's number."""
        out = self.on(self.hosts[0], "sbatch", "--parsable", f"--chdir={self.home}",
                      f"--output={self.home}/job-%j.out", *command)  # fmt: skip
        assert out.strip().isdecimal(), (out, self.logs())
        return out.strip()

    def requeue(self, job: str) -> None:
        """Let a job that has ended run once more, as `scontrol requeue` does."""

        def requeued() -> bool:  # Slurm refuses it while the job's processes end
            self.on(self.hosts[0], "scontrol", "requeue", job)
            return self.state(job) not in OVER

        self._await(requeued, "requeued")
        # Slurm holds a requeued job back for two minutes, for the sake of failing hosts.
        self.on(self.hosts[0], "scontrol", "update", f"JobId={job}", "StartTime=now")

    def result(self, job: str, seconds: float = 120) -> tuple[str, str]:
        """Wait until the job has ended; return its state and what it wrote."""
        self._await(lambda: self.state(job) in OVER, f"over, but {self.state(job)}", seconds)
        written = self.home / f"job-{job}.out"
        return self.state(job), written.read_text() if written.exists() else ""

    def state(self, job: str) -> str:
        """Return the job's state, such as PENDING or FAILED."""
        shown = self.on(self.hosts[0], "scontrol", "show", "job", job)
        words = dict(word.split("=", 1) for word in shown.split() if "=" in word)
        return words.get("JobState", "")

    def end(self) -> None:
        """Kill the daemons; what they started ends with the hosts."""
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait(DEADLINE)


@contextlib.contextmanager
def slurm_cluster(directory: Path) -> Iterator[Cluster]:
    """Make a cluster of two hosts, which ends afterwards."""
    with network_of(2, directory) as (network, hosts):
        cluster = Cluster(network, hosts, directory)
        try:
            yield cluster
        finally:
            cluster.end()
