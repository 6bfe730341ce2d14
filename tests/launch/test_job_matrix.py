"""Whole jobs of real processes, started in every way, over every kind of interface.

Each runs tests/programs/every_call.py, which makes every call and compares each result with the
oracle, bit for bit.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from extra_values import more, more_but
from transport_ranks import free_port, has_ipv6

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parents[1] / "programs" / "every_call.py"
DEADLINE = 50.0  # seconds for a job

Commands = list[tuple[list[str], dict[str, str]]]


def cydistrun(ranks: int, directory: Path) -> Commands:
    return [(["-m", "cydist.run", "--nproc-per-node", f"{ranks}", str(PROGRAM)], {})]


def torchrun(ranks: int, directory: Path) -> Commands:
    module = ["-m", "torch.distributed.run", "--nproc-per-node", f"{ranks}"]
    return [([*module, "--master-port", f"{free_port()}", str(PROGRAM)], {})]


def spawn(ranks: int, directory: Path) -> Commands:
    return [([str(PROGRAM), "--spawn", f"{ranks}"], {})]


def by_variables(ranks: int, directory: Path, host: str = "127.0.0.1") -> Commands:
    where = {"MASTER_ADDR": host, "MASTER_PORT": f"{free_port(host)}", "WORLD_SIZE": f"{ranks}"}
    return [([str(PROGRAM)], {"RANK": f"{rank}", **where}) for rank in range(ranks)]


def by_variables_ipv6(ranks: int, directory: Path) -> Commands:
    return by_variables(ranks, directory, "::1")


def by_tcp(ranks: int, directory: Path, host: str = "127.0.0.1") -> Commands:
    return by_url(f"tcp://{host}:{free_port(host.strip('[]'))}", ranks)


def by_tcp_ipv6(ranks: int, directory: Path) -> Commands:
    return by_tcp(ranks, directory, "[::1]")


def by_file(ranks: int, directory: Path) -> Commands:
    return by_url(f"file://{directory}/meeting", ranks)


def by_file_counted(ranks: int, directory: Path) -> Commands:
    """The file gives the ranks."""
    return [
        ([str(PROGRAM), f"file://{directory}/meeting", "-", f"{ranks}"], {}) for _ in range(ranks)
    ]


def by_url(url: str, ranks: int) -> Commands:
    return [([str(PROGRAM), url, f"{rank}", f"{ranks}"], {}) for rank in range(ranks)]


def run(commands: Commands, directory: Path, **more: str) -> str:
    """What all processes print; every one must end well before the deadline."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("CYDIST_", "GLOO_"))}
    common = {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(directory), **more}
    with tempfile.TemporaryFile() as output:
        processes = [
            subprocess.Popen(
                [sys.executable, *arguments],
                cwd=directory, env={**inherited, **common, **own},
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )
            for arguments, own in commands
        ]  # fmt: skip
        try:
            codes = [process.wait(DEADLINE) for process in processes]
        except subprocess.TimeoutExpired:
            codes = ["late"]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        output.seek(0)
        text = output.read().decode()
    assert [0] * len(commands) == codes, text
    return text


def all_ranks_succeeded(ranks: int, output: str) -> None:
    """Assert that each rank has compared its results."""
    said = re.findall(r"rank (\d) of (\d): (\d+) results as expected", output)
    assert [(f"{rank}", f"{ranks}") for rank in range(ranks)] == sorted(s[:2] for s in said), output
    assert min(int(count) for _, _, count in said) > 1000


@pytest.mark.parametrize("ranks", [2, *more(1, 3, 4)])
def test_cydistrun(tmp_path: Path, ranks: int) -> None:
    """python -m cydist.run --nproc-per-node N."""
    all_ranks_succeeded(ranks, run(cydistrun(ranks, tmp_path), tmp_path))


@pytest.mark.more
def test_torchrun(tmp_path: Path) -> None:
    """torchrun's variables and its agent's store are enough."""
    pytest.importorskip("torch.distributed.run")
    all_ranks_succeeded(2, run(torchrun(2, tmp_path), tmp_path))


WAYS = {
    "spawn": spawn,
    "variables": by_variables,
    "tcp": by_tcp,
    "file": by_file,
    "file-counts-ranks": by_file_counted,
}


@pytest.mark.parametrize("start", more_but([spawn, by_file_counted], WAYS.values()), ids=WAYS)
def test_started_by_hand(tmp_path: Path, start: Callable[[int, Path], Commands]) -> None:
    """Without a launcher: children of a program, variables, URLs."""
    all_ranks_succeeded(2, run(start(2, tmp_path), tmp_path))


IPV6 = {"variables": by_variables_ipv6, "tcp": by_tcp_ipv6}


@pytest.mark.parametrize("start", more_but([by_tcp_ipv6], IPV6.values()), ids=IPV6)
def test_over_ipv6(tmp_path: Path, start: Callable[[int, Path], Commands]) -> None:
    """MASTER_ADDR=::1 and tcp://[::1]:port."""
    if not has_ipv6():
        pytest.skip("no IPv6")
    all_ranks_succeeded(2, run(start(2, tmp_path), tmp_path))


@pytest.mark.parametrize("names", [*more("lo", "lo,lo"), "127.0.0.1,127.0.0.2"])
def test_interfaces(tmp_path: Path, names: str) -> None:
    """GLOO_SOCKET_IFNAME names one interface or several, which are used in turn."""
    commands = cydistrun(2, tmp_path)
    all_ranks_succeeded(2, run(commands, tmp_path, GLOO_SOCKET_IFNAME=names))


@pytest.mark.more
def test_interface_of_each_family(tmp_path: Path) -> None:
    """One lane over IPv4, the other over IPv6."""
    if not has_ipv6():
        pytest.skip("no IPv6")
    commands = cydistrun(2, tmp_path)
    all_ranks_succeeded(2, run(commands, tmp_path, GLOO_SOCKET_IFNAME="127.0.0.1,::1"))


def test_the_program_notices_one_bit() -> None:
    """What these jobs run fails when a result differs in its last bit, and says where."""
    spec = importlib.util.spec_from_file_location("every_call", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    everything = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(everything)
    check = everything.Checks.__new__(everything.Checks)
    check.rank, check.size, check.count = 1, 2, 0
    one = np.ones(3, "f4")
    with pytest.raises(everything.Differs, match="scan of 3 float32 on rank 1 of 2: expected"):
        check.compare("scan", [(one, np.nextafter(one, np.float32(2)))])
