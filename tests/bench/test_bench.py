"""`python -m cydist.bench`: fair rounds, checked results, and honest arithmetic."""

from __future__ import annotations

import importlib.util
import json
import math
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from extra_values import more
from launched_hosts import without_notices

import cydist
from cydist.bench import mpi_start, options, report
from cydist.bench.buffers import Buffers, dtype_of
from cydist.bench.cases import IN_BLOCKS, MORE_OPS, OPS, Case, algbw, busbw, cases
from cydist.bench.peers import Bound, TorchLike, same
from cydist.bench.rank_loop import Session
from cydist.bench.runner import Measurements, Row, ratio, run_cases
from cydist.bench.spawn import Spec
from cydist.bench.workers import Worker, WorkerError

ROOT = Path(__file__).resolve().parents[2]
BYTES = 4096


def run(*arguments: str, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    """The program, to its end."""
    command = [sys.executable, "-m", "cydist.bench", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )


# ---- the command line ----


@pytest.mark.parametrize(
    ("text", "expected"),
    [("8", 8), ("8B", 8), ("1Ki", 1024), ("64k", 65536), ("1MiB", 1 << 20), ("2G", 2 << 30)],
)
def test_sizes(text: str, expected: int) -> None:
    """Sizes are bytes, with the units that people write."""
    assert options.size(text) == expected


@pytest.mark.parametrize("text", ["", "0", "-8", "1.5Mi", "8Ti", "Ki"])
def test_sizes_that_are_none(text: str) -> None:
    """What is not a size is named in the error."""
    with pytest.raises(ValueError, match="is not a size"):
        options.size(text)


def test_peers() -> None:
    """--vs names the peers, and the interpreters of the MPIs."""
    specs = options.peers(
        "gloo,openmpi=/a/python,tcp,shared,mpich-polled=/b/python,windows,torch:cydist,plain,"
        "intelmpi=/c/python"
    )
    assert [(spec.name, spec.kind, spec.python) for spec in specs] == [
        ("gloo", "torch", None), ("openmpi", "mpi", "/a/python"), ("tcp", "cydist", None),
        ("shared", "cydist", None), ("mpich-polled", "mpi-polled", "/b/python"),
        ("windows", "cydist", None), ("torch:cydist", "torch", None), ("plain", "cydist", None),
        ("intelmpi", "mpi", "/c/python"),
    ]  # fmt: skip
    assert [spec.name for spec in options.peers("GLOO,Torch:Cydist,OpenMPI=/A/python")] == [
        "gloo", "torch:cydist", "openmpi"
    ]  # fmt: skip
    assert specs[0].options == {"backend": "gloo"}
    assert specs[6].options == {"backend": "cydist"}
    assert specs[2].options["TRANSPORT"] == "tcp"
    assert specs[3].options["arrays"] == "shared"
    assert specs[5].options["TRANSPORT"] == "shm"
    assert (specs[7].options["TRANSPORT"], specs[7].options["ENCRYPT"]) == ("tcp", "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sizes", "8,zwei"], "'zwei' is not a size"),
        (["--ops", "all_reduce,sort"], "no 'sort'"),
        (["--vs", "openmpi"], "--vs openmpi=PYTHON"),
        (["--vs", "nccl"], "with =PYTHON openmpi, openmpi-tcp, openmpi-polled, mpich"),
        (["--dtype", "object_"], "no dtype 'object_'"),
        (["--ranks", "1"], "--ranks 1"),
        (["--rounds", "0"], "--rounds 0"),
        (["--json", "/no/such/folder/x.json"], "no such folder"),
        (["--plot", "x.foo"], "--plot x.foo: write .png, .svg or .pdf"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_options(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong option ends the program before anything is started, with a message that helps."""
    with pytest.raises(SystemExit):
        options.parse(arguments)
    assert said in capsys.readouterr().err


def test_cells_are_whole_blocks() -> None:
    """Sizes become elements, and equal blocks where there is one for each rank."""
    found = [(c.op, c.count, c.nbytes) for c in cases(OPS, [8, 100], "float32", 4, 3)]
    assert ("all_reduce", 2, 8) in found
    assert ("all_gather", 3, 12) in found
    assert ("all_to_all", 24, 96) in found
    assert [each for each in found if each[0] == "barrier"] == [("barrier", 0, 0)]


# ---- arithmetic ----


@pytest.mark.parametrize(
    ("op", "algorithm", "bus"),
    [
        ("all_reduce", 1.0, 1.5),
        ("broadcast", 1.0, 1.0),
        ("all_gather", 1.0, 0.75),
        ("reduce_scatter", 1.0, 0.75),
        ("all_to_all", 1.0, 0.75),
        ("pingpong", 2.0, 2.0),
        ("one_way", 1.0, 1.0),
    ],
)
def test_bandwidths(op: str, algorithm: float, bus: float) -> None:
    """A MB in a ms is a GB/s; the bus carries what nccl-tests says that 4 ranks make of it."""
    case = Case(op, 250_000, "float32", 1_000_000)
    assert algbw(case, 1e-3) == pytest.approx(algorithm * 1e9)
    assert busbw(case, 1e-3, 4) == pytest.approx(bus * 1e9)


def test_p99_is_of_single_calls() -> None:
    """The calls' 99th percentile, or nothing when they were too short to time."""
    assert Measurements(calls=[float(n) for n in range(1000)]).p99 == 990.0
    assert Measurements(rounds=[1.0]).p99 is None


def test_ratio_is_taken_inside_rounds() -> None:
    """The median of the rounds' ratios: what slows a whole round down changes nothing."""
    ours, theirs = Measurements(rounds=[1.0, 20.0, 3.0]), Measurements(rounds=[2.0, 40.0, 6.0])
    assert ratio(ours, theirs) == 0.5


def row(ours: float, **peers: float) -> Row:
    return {name: Measurements(rounds=[time]) for name, time in {"cydist": ours, **peers}.items()}


def test_summary_takes_the_best_peer() -> None:
    """Ratios go to the fastest peer of each cell; cydist over TCP is no peer."""
    small, large = Case("broadcast", 2, "float32", 8), Case("broadcast", 16, "float32", 64)
    rows = [
        (small, row(1.0, gloo=4.0, mpich=2.0, tcp=0.1)),
        (large, row(8.0, gloo=4.0, mpich=16.0, tcp=0.1)),
    ]
    entry = report.summary(rows)[-1]
    assert entry["op"] == "all"
    assert entry["best peer"] == pytest.approx(math.sqrt(0.5 * 2.0))
    assert (entry["worst"], entry["worst cell"]) == (2.0, "broadcast 64")
    assert entry["mpich"] == pytest.approx(0.5)


# ---- checked results ----


class Ranks:
    """A participant whose ranks are threads: cydist on the backend "inproc", or a library of ours.

    Args:
        library: Made on every rank, as TorchLike is.
    """

    def __init__(self, job: Any, library: type[TorchLike] = TorchLike, name: str = "cydist"):
        self.name = name
        self._job = job
        self._sessions = job.run(lambda rank: Session(library(cydist, same, {})))

    def command(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        if "iterations" in command:
            command = command | {"iterations": 1, "sampled": "sampled" in command}
        answers: list[dict[str, Any]] = self._job.run(
            lambda rank: self._sessions[rank].do(command) | {"ns": 10**9}
        )
        return answers

    def close(self) -> None:
        pass


class Careless(TorchLike):
    """Damages the last element of what rank 1 receives, in every call."""

    def bind(self, op: str, send: Any, recv: Any) -> Bound:
        function, arguments = super().bind(op, send, recv)

        def call(*given: Any) -> None:
            function(*given)
            if self.rank == 1:
                recv[-1] += 1

        return call, arguments


@pytest.mark.parametrize("op", [*OPS, *MORE_OPS])
@pytest.mark.parametrize("dtype", ["float32", *more("int8", "complex128")])
def test_right_results_are_right(jobs: Any, op: str, dtype: str) -> None:
    """A library that is right has nothing counted against it, in single calls and in loops."""
    found = list(cases([op], [BYTES], dtype, dtype_of(dtype).itemsize, 3))
    ((_, seen),) = run_cases(found, [Ranks(jobs.get("inproc", 3))], rounds=1)
    assert (seen["cydist"].failure, seen["cydist"].wrong) == ("", 0)


@pytest.mark.parametrize("op", [op for op in OPS if op != "barrier"])
def test_wrong_results_are_counted(jobs: Any, op: str) -> None:
    """One damaged element is one in #wrong for each call that is checked: two and a loop's last."""
    found = list(cases([op], [BYTES], "float32", 4, 3))
    ((_, seen),) = run_cases(found, [Ranks(jobs.get("inproc", 3), Careless)], rounds=2)
    # In place, what a call damages goes round in the next: all see it, and rank 1 twice.
    expected = {"all_reduce": 2 + 3}.get(op, 2 + 1)
    assert seen["cydist"].wrong == expected


def test_early_barriers_are_counted() -> None:
    """A barrier that some rank leaves before another has come is wrong."""

    class Early(Scripted):
        def command(self, command: dict[str, Any]) -> list[dict[str, Any]]:
            if command["do"] == "round":
                return super().command(command)
            early, fine = [10, 100], [20, 130]
            return [
                {"wrong": 0, "algorithm": "", "entered": [1, 110], "left": early},
                {"wrong": 0, "algorithm": "", "entered": [12, 90], "left": fine},
            ]

    ((_, seen),) = run_cases([Case("barrier", 0, "float32", 0)], [Early("cydist", [])], rounds=1)
    assert seen["cydist"].wrong == 2


@pytest.mark.parametrize("op", sorted(IN_BLOCKS | {"all_reduce", "reduce", "scan", "exscan"}))
def test_nothing_received_is_wrong(op: str) -> None:
    """A call that does nothing leaves wrong elements behind: the check cannot pass by itself."""
    buffers = Buffers(op, 3000, "float32", 0 if op in ("reduce", "gather") else 1, 3)
    buffers.fill(0)
    assert buffers.wrong(0) > buffers.recv.size // 2


def test_values_fill_long_arrays() -> None:
    """Arrays longer than the period of the values are filled and checked to their end."""
    buffers = Buffers("broadcast", 200_000, "float32", 0, 2)
    buffers.fill(1)
    assert buffers.wrong(1) == 0
    buffers.recv[-1] = np.nan
    assert buffers.wrong(1) == 1


# ---- rounds ----


class Scripted:
    """A participant of one rank that answers at once, and notes who was asked when.

    Args:
        fails: {number of the command: what it raises}.
    """

    def __init__(
        self, name: str, seen: list[str], fails: dict[int, WorkerError] | None = None
    ) -> None:
        self.name = name
        self.closed = False
        self._seen, self._fails, self._asked = seen, fails or {}, 0

    def command(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        self._asked += 1
        if (error := self._fails.get(self._asked)) is not None:
            raise error
        if command["do"] == "case":
            return [{"wrong": 0, "algorithm": "ring"}]
        if command["checked"] or command["sampled"]:
            self._seen.append(self.name)
        each = {"each_ns": [10**9]} if command["sampled"] else {}
        return [{"ns": 10**9, "wrong": 0, **each}]

    def close(self) -> None:
        self.closed = True


def scripted(case: Sequence[Case], *workers: Scripted, rounds: int = 3) -> list[Row]:
    return [row for _, row in run_cases(case, workers, rounds)]


ONE = Case("broadcast", 2, "float32", 8)
TWO = Case("broadcast", 4, "float32", 16)


def test_rounds_are_interleaved() -> None:
    """Each round runs every rank once, and each time somebody else comes first."""
    seen: list[str] = []
    scripted([ONE], *(Scripted(name, seen) for name in "abc"))
    assert seen == list("abcbcacab")


def test_a_refusal_costs_one_cell() -> None:
    """Who refuses a cell is asked for the next one; the others have their rows in full."""
    refusal = WorkerError("b: no such dtype", lost=False)
    first, second = scripted([ONE, TWO], Scripted("a", []), Scripted("b", [], {1: refusal}))
    assert first["b"].failure == "b: no such dtype"
    assert len(first["a"].rounds) == len(second["b"].rounds) == 3


def test_a_loss_is_for_good() -> None:
    """Who is lost in a round keeps what it had, is ended, and is not asked again."""
    loss = WorkerError("b: rank 0 is gone", lost=True)
    lost = Scripted("b", [], {4: loss})
    first, second = scripted([ONE, TWO], Scripted("a", []), lost)
    assert (first["b"].failure, len(first["b"].rounds)) == ("b: rank 0 is gone", 1)
    assert lost.closed
    assert list(second) == ["a"]


# ---- participants ----


def test_what_cannot_start_says_why(tmp_path: Path) -> None:
    """A library that does not start on its ranks is named, with its own error."""
    spec = Spec("other", "cydist", None, {"backend": "nosuch", "arrays": "numpy"})
    with pytest.raises(WorkerError, match=r"other: rank \d: ValueError.*nosuch"):
        Worker(spec, 2, str(tmp_path), 60)


def test_a_rank_that_dies_is_a_loss(tmp_path: Path) -> None:
    """When a rank's process ends, the next command says so at once and the rest is ended."""
    worker = Worker(options.cydist("tcp", "numpy"), 2, str(tmp_path), 60)
    try:
        connection, _ = worker._ranks[1]
        connection.shutdown(socket.SHUT_RDWR)
        with pytest.raises(WorkerError, match="gone") as raised:
            worker.command({"do": "case", "op": "barrier", "count": 0, "dtype": "float32"})
        assert raised.value.lost
    finally:
        worker.close()


def test_mpi_ranks_need_no_compiled_code(tmp_path: Path) -> None:
    """What an MPI's own Python runs comes as far as mpi4py without anything compiled of ours."""
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "MPI.py").write_text(
        "import sys\n"
        "raise ImportError('compiled' if 'cydist._native' in sys.modules else 'plain')\n"
    )
    address = str(tmp_path / "sock")
    heard: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        listener.settimeout(50)

        def listen() -> None:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as lines:
                heard.append(lines.readline())

        thread = threading.Thread(target=listen)
        thread.start()
        command = [sys.executable, mpi_start.__file__, address, str(tmp_path / "log"), "mpi", "{}"]
        subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, timeout=50, check=True)
        thread.join(50)
    assert json.loads(heard[0]) == {"error": "ImportError: plain"}


# ---- the program ----


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_run(tmp_path: Path) -> None:
    """A table with a row for each cell and a JSON file; a peer that is not there is told."""
    file = tmp_path / "figures.json"
    ended = run(
        "--ops", "all_reduce,barrier", "--sizes", "8,1Ki", "--rounds", "2",
        "--vs", "tcp,shared,openmpi=/no/such/python", "--json", str(file),
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == "openmpi: cannot be started: /no/such/python is not an interpreter\n"
    lines = [line.split() for line in ended.stdout.splitlines() if line and line[0] == " "]
    assert [line[:4] for line in lines[1:]] == [
        ["8", "2", "float32", "all_reduce"],
        ["1024", "256", "float32", "all_reduce"],
        ["0", "0", "float32", "barrier"],
    ]
    found = json.loads(file.read_text())
    assert {"command", "date", "machine", "python", "ranks", "load"} <= found["header"].keys()
    assert [case["op"] for case in found["cells"]] == ["all_reduce", "all_reduce", "barrier"]
    for case in found["cells"]:
        assert case["participants"].keys() == {"cydist", "tcp", "shared"}
        for measurements in case["participants"].values():
            assert measurements["wrong"] == 0
            assert len(measurements["rounds"]) == 2
            assert measurements["median"] == pytest.approx(sum(measurements["rounds"]) / 2)
        assert case["ratios"].keys() == {"tcp", "shared"}
    assert found["summary"][-1]["op"] == "all"


@pytest.mark.slow
@pytest.mark.more
@pytest.mark.timeout(120)
def test_gloo_beside_us(tmp_path: Path) -> None:
    """torch with gloo and torch with cydist run every op beside cydist on torch's gloo; all are
    right."""
    pytest.importorskip("torch")
    file = tmp_path / "figures.json"
    peers = ("--vs", "gloo,torch:cydist", "--backend", "torch:gloo", "--json", str(file))
    ended = run("--sizes", "64", "--rounds", "1", *peers)
    assert (ended.returncode, without_notices(ended.stderr)) == (0, "")
    cases = json.loads(file.read_text())["cells"]
    for name in ("cydist", "gloo", "torch:cydist"):
        assert [(case["op"], case["participants"][name]["wrong"]) for case in cases] == [
            (op, 0) for op in OPS
        ]


def test_ranks_that_are_threads(tmp_path: Path) -> None:
    """--backend inproc times ranks of one process, with right results."""
    file = tmp_path / "figures.json"
    arguments = ("--ranks", "3", "--sizes", "1Ki", "--rounds", "1", "--json", str(file))
    ended = run("--backend", "inproc", "--ops", "all_reduce,broadcast,barrier", *arguments)
    assert (ended.returncode, without_notices(ended.stderr)) == (0, "")
    assert "3 threads of one process on this machine" in ended.stdout
    for case in json.loads(file.read_text())["cells"]:
        measurements = case["participants"]["cydist"]
        assert (measurements["wrong"], len(measurements["rounds"])) == (0, 1)


def test_memory_of_threads_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks that share a process share its memory, too."""
    with pytest.raises(SystemExit):
        options.parse(["--backend", "inproc"], "memory")
    assert "cannot be told" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_raw_sockets_beside_us(tmp_path: Path) -> None:
    """Raw sockets run every op of the table beside cydist, and are right; of the others they say
    that they have them not, and have no ratio."""
    file = tmp_path / "figures.json"
    arguments = ("--sizes", "64,256Ki", "--rounds", "1", "--vs", "raw", "--json", str(file))
    ended = run("--ops", ",".join((*OPS, *MORE_OPS)), *arguments)
    refusals = ended.stderr.splitlines()
    assert ended.returncode == 0
    assert [line for line in refusals if "raw sockets have no" not in line] == []
    cases = json.loads(file.read_text())["cells"]
    found = {case["op"]: (case["participants"]["raw"], case["ratios"]) for case in cases}
    ops = {*OPS, "one_way"}
    assert {op for op in ops if found[op][0]["wrong"] == 0 and "raw" in found[op][1]} == ops
    for op in {*MORE_OPS} - ops:
        raw, ratios = found[op]
        assert f"raw sockets have no {op}" in raw["failure"]
        assert ratios == {}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_encrypted_beside_plain_and_gloo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run takes turns: encrypted connections, plain ones, and gloo if torch is here. It says
    which is encrypted, and the least and most of the rounds."""
    peers = ["plain", *(["gloo"] if importlib.util.find_spec("torch") else [])]
    monkeypatch.setenv("CYDIST_TRANSPORT", "tcp")
    monkeypatch.setenv("CYDIST_ENCRYPT", "1")
    file = tmp_path / "figures.json"
    ended = run(
        "--ops", "one_way,all_reduce", "--sizes", "8,64Ki", "--rounds", "2", "--spread",
        "--vs", ",".join(peers), "--json", str(file),
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(file.read_text())
    assert figures["header"]["cydist"].endswith("tcp, messages, encrypted")
    assert figures["header"]["plain"].endswith("tcp, messages")
    for cell in figures["cells"]:
        assert cell["participants"].keys() == {"cydist", *peers}
        assert all(each["wrong"] == 0 for each in cell["participants"].values())
    spread = ended.stdout.partition("least, median and most of the rounds\n")[2].splitlines()[1:]
    assert [line.split()[:3] for line in spread[: 1 + len(peers)]] == [
        ["one_way", "8", name] for name in ("cydist", *peers)
    ]
    least, median, most = map(float, spread[1].split()[-3:])
    assert 0 < least <= median <= most


def test_spread_is_of_rounds() -> None:
    """The spread is of times, rates and ratios inside rounds; a failure has none."""
    measured = {
        "cydist": Measurements(rounds=[1e-3, 4e-3, 2e-3]),
        "gloo": Measurements(rounds=[2e-3, 2e-3, 2e-3]),
        "mpich": Measurements(failure="lost"),
    }
    case = Case("one_way", 250_000, "float32", 1_000_000)
    lines = report.spread_lines([(case, measured), (Case("barrier", 0, "float32", 0), measured)])
    assert [" ".join(line.split()) for line in lines[3:]] == [
        "one_way 1000000 cydist 1000 2000 4000 0.250 0.500 1.000",
        "one_way 1000000 gloo 2000 2000 2000 0.500 0.500 0.500 0.50 1.00 2.00",
        "barrier 0 cydist 1000 2000 4000",
        "barrier 0 gloo 2000 2000 2000 0.50 1.00 2.00",
    ]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([8], [8]),
        ([8, 16], [8, 16]),
        ([8, 1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 27], [8, 1 << 10, 1 << 16, 1 << 20, 1 << 27]),
    ],
    ids=["one", "two", "close"],
)
def test_labels_of_sizes_do_not_overlap(sizes: list[int], expected: list[int]) -> None:
    """The largest size has a label, and others that are far enough from each other."""
    from cydist.bench.plot import apart

    assert apart(sizes) == expected


def test_plot(tmp_path: Path) -> None:
    """The plot is written, whatever is missing from the rows."""
    pytest.importorskip("matplotlib")
    from cydist.bench.plot import draw

    barrier = Case("barrier", 0, "float32", 0)
    rows = [(ONE, row(1.0, gloo=2.0)), (TWO, row(1.0)), (barrier, row(1.0))]
    draw(rows, "two ranks", str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(1, "1"), (8, "8"), (1020, "1020"), (1536, "1.5Ki"), (1 << 16, "64Ki"), (1 << 27, "128Mi")],
)
def test_sizes_on_the_axis(nbytes: int, text: str) -> None:
    """The axis says bytes as a user writes them."""
    from cydist.bench.plot import size_text

    assert size_text(nbytes) == text
