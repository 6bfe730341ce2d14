"""The command line of `python -m cydist.bench`."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cydist.bench.buffers import dtype_of
from cydist.bench.cases import MORE_OPS, OPS
from cydist.bench.spawn import Spec

WIDTH = 79  # of help texts
SIZES = "8,1Ki,64Ki,1Mi,16Mi"
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
SIZE = re.compile(r"(\d+)\s*(?:([kmg])i?)?b?", re.I)
MPIS = ("openmpi", "openmpi-tcp", "openmpi-polled", "mpich", "mpich-polled", "intelmpi")
PLOTS = (".png", ".svg", ".pdf")
OVER_TCP = ("--mca", "pml", "ob1", "--mca", "btl", "self,tcp")

SUBJECTS = """
The other subjects, each with a --help of its own:
  python -m cydist.bench job        the same as a job of any launcher, also on several hosts
  python -m cydist.bench kernels    reductions, packing and flattening, against numpy and torch
  python -m cydist.bench overlap    how much of an asynchronous all_reduce computing hides
  python -m cydist.bench paths      what the general path takes beyond the fast path
  python -m cydist.bench startup    import, init_process_group, new_group, many processes
  python -m cydist.bench rendezvous  how long many ranks take to meet, and what the store serves
  python -m cydist.bench memory     how much memory a call takes
  python -m cydist.bench --simulate  price collectives on many hosts by a model
  python -m cydist.bench --tune     find the fastest algorithms for this machine, and save them;
                                    with --job for the hosts of the job that runs it
"""
PEERS = """
Libraries of --vs, separated by commas:
  gloo              torch.distributed with gloo; needs torch here
  torch:NAME        torch.distributed with its backend NAME; torch:cydist is this project as one
  openmpi=PYTHON    an interpreter of an environment with mpi4py and Open MPI, whose mpirun lies
  mpich=PYTHON      beside it or in PATH; the same with MPICH
  intelmpi=PYTHON   the same with Intel MPI
  openmpi-tcp=PYTHON    Open MPI over TCP only
  openmpi-polled=PYTHON, mpich-polled=PYTHON    by non-blocking calls, polled until complete
  windows           cydist's backend tcp through shared memory, to compare --backend mpi with
  tcp               cydist over TCP only
  plain             the same without encryption, to compare CYDIST_ENCRYPT=1 with
  shared            cydist on arrays from empty_shared
  raw               one polled TCP connection between 2 ranks: the limit of what tcp can reach
"""


@dataclass(frozen=True)
class BenchOptions:
    """The checked options: see `parse`."""

    workers: list[Spec]  # cydist first
    ranks: int
    ops: list[str]
    sizes: list[int]
    dtype: str
    rounds: int
    timeout: float
    json: str | None
    plot: str | None
    spread: bool


def size(text: str) -> int:
    """Return a number of bytes from 8, 1Ki, 64k or 1MiB; k, M and G are powers of 1024. Raises
    ValueError."""
    match = SIZE.fullmatch(text.strip())
    if match is None or int(match[1]) == 0:
        raise ValueError(f"{text!r} is not a size: write bytes as 8, 1Ki, 64Ki, 1Mi or 1Gi")
    return int(match[1]) * UNITS[(match[2] or "").lower()]


def calls_text(title: str, ops: Sequence[str]) -> str:
    """Return lines of a help text that list calls."""
    return textwrap.fill(f"{title}: {', '.join(ops)}.", WIDTH, break_on_hyphens=False)


def parse(
    arguments: Sequence[str],
    subject: str = "",
    description: str = "Time collectives on this machine, and compare them with other libraries.",
    ops: Sequence[str] = OPS,
    sizes: str = SIZES,
    least_ranks: int = 2,
) -> BenchOptions:
    """Return the options of a subject that has participants; a wrong one ends the program.

    Args:
        subject: "" for the collectives themselves, which alone have a plot and MORE_OPS.
        ops: The available ops, all by default.
    """
    more = () if subject else MORE_OPS
    calls = f"\n{calls_text('Calls of --ops, all by default', ops)}"
    calls += f"\n{calls_text('Further ones', more)}" if more else ""
    epilog = calls + PEERS + ("" if subject else SUBJECTS)
    parser = local_parser(subject, description, epilog)
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="processes of each library (2)")
    add("--ops", default=",".join(ops), metavar="OP,...", help="calls to time, see below")
    add("--sizes", default=sizes, help=f"bytes of a call; 64k is 64Ki ({sizes})")
    add("--dtype", default="float32", help="of the elements, by numpy's or ml_dtypes' name")
    add("--vs", default="", metavar="PEER,...", help="libraries to compare with, see below")
    add(
        "--backend",
        default="tcp",
        help="of cydist: tcp (default), mpi under mpirun, inproc with threads, or another",
    )
    add("--arrays", default="numpy", choices=("numpy", "torch"), help="array library to benchmark")
    add("--timeout", type=float, default=120, help="seconds for a start or a round (120)")
    if not subject:
        add("--plot", metavar="FILE", help=f"draw time against size ({', '.join(PLOTS)})")
        add("--spread", action="store_true", help="also print the least and the most of all rounds")
    given = checked(parser, arguments)
    try:
        wanted = [size(text) for text in given.sizes.split(",")]
        dtype_of(given.dtype)
        workers = [cydist(given.backend, given.arrays), *peers(given.vs, given.arrays)]
    except ValueError as error:
        parser.error(str(error))
    chosen = given.ops.split(",")
    if unknown := [op for op in chosen if op not in (*ops, *more)]:
        parser.error(f"--ops: no {unknown[0]!r}; there are {', '.join((*ops, *more))}")
    if given.ranks < least_ranks:
        parser.error(f"--ranks {given.ranks}: needs at least {least_ranks} to be timed")
    if subject == "memory" and given.backend == "inproc":
        parser.error("--backend inproc: the memory of ranks that share a process cannot be told")
    if given.arrays == "torch" and importlib.util.find_spec("torch") is None:
        parser.error("--arrays torch needs torch: pip install torch")
    return BenchOptions(
        workers, given.ranks, chosen, wanted, given.dtype, given.rounds, given.timeout,
        given.json, None if subject else given.plot, not subject and given.spread,
    )  # fmt: skip


def local_parser(subject: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    """Return a parser with the options of every subject: --rounds and --json."""
    parser = argparse.ArgumentParser(
        prog=f"python -m cydist.bench {subject}".rstrip(),
        description=textwrap.fill(description, WIDTH),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=7, help="number of rounds (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="save all figures")
    return parser


def checked(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Return the arguments as parsed and checked by a parser of `local_parser`."""
    given = parser.parse_args(arguments)
    if given.rounds < 1:
        parser.error(f"--rounds {given.rounds}: at least one")
    plot = getattr(given, "plot", None)
    if plot is not None and Path(plot).suffix.lower() not in PLOTS:
        parser.error(f"--plot {plot}: write {', '.join(PLOTS[:-1])} or {PLOTS[-1]}")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    for path in filter(None, (given.json, plot)):
        if not Path(path).resolve().parent.is_dir():
            parser.error(f"{path}: there is no such folder")
    return given


def cydist(backend: str, arrays: str, name: str = "cydist", **settings: str) -> Spec:
    """Return cydist as a worker; `settings` have names without CYDIST_."""
    python = sys.executable if backend == "mpi" else None
    options = {"backend": backend, "arrays": arrays, **settings}
    return Spec(name, "cydist", python, options)


def peers(text: str, arrays: str = "numpy") -> list[Spec]:
    """Return the peers that --vs asks for. Raises ValueError."""
    specs: dict[str, Spec] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, python = item.partition("=")
        name = name.lower()
        item = name + equals + python
        if name in MPIS:
            if not python:
                raise ValueError(f"--vs {name}=PYTHON: which interpreter has that MPI's mpi4py?")
            specs[name] = Spec(
                name,
                "mpi-polled" if name.endswith("polled") else "mpi",
                python,
                arguments=OVER_TCP if name.endswith("tcp") else (),
            )
        elif item == "raw":
            specs[item] = Spec(item, item)
        elif item == "gloo" or (item.startswith("torch:") and item != "torch:"):
            backend = item.removeprefix("torch:")
            specs[item] = Spec(item, "torch", options={"backend": backend})
        elif item == "tcp":
            specs[name] = cydist("tcp", arrays, "tcp", TRANSPORT="tcp")
        elif item == "plain":
            specs[name] = cydist("tcp", arrays, "plain", TRANSPORT="tcp", ENCRYPT="")
        elif item == "windows":
            specs[name] = cydist("tcp", arrays, "windows", TRANSPORT="shm")
        elif item == "shared":
            specs[name] = cydist("tcp", "shared", "shared")
        else:
            raise ValueError(
                f"--vs {item}: the peers are gloo, torch:NAME, tcp, plain, windows, shared, "
                f"raw, and with =PYTHON {', '.join(MPIS)}"
            )
    return list(specs.values())
