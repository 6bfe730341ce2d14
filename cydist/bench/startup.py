"""Subject "startup": the time before the first call."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from cydist.bench import inprocess, report, sysinfo
from cydist.bench.options import checked, local_parser
from cydist.bench.runner import Measurements, Row, ratio
from cydist.errors import DistError, counted
from cydist.launch.spawn import spawn

TIMEOUT = 120
NEW_GROUPS = 20
NOTHING = "pass"
# A rank that only joins the job and leaves it, with its array library.
RANK = (
    "import numpy, cydist as d;d.init_process_group('tcp'); d.barrier(); d.destroy_process_group()"
)


def main(arguments: Sequence[str]) -> int:
    """Print the table; return 1 if a job failed, else 0."""
    parser = local_parser("startup", "Time imports, joining a job, groups, and many processes.")
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="of the job whose start is timed (2)")
    add("--processes", type=int, default=8, help="of the job that is timed as a whole (8)")
    add("--vs", default="", choices=("", "gloo"), help="gloo: compare with torch.distributed")
    given = checked(parser, arguments)
    if given.vs and importlib.util.find_spec("torch") is None:
        parser.error("--vs gloo needs torch: pip install torch")
    about = sysinfo.describe(["startup", *arguments])
    print(report.header(about))
    print(f"{'':<44} {'median ms':>10}   cydist's time by it", flush=True)
    try:
        with as_installed():
            found = {
                "importing": show("importing", imports(given.rounds)),
                **joining(given.ranks, given.rounds, bool(given.vs)),
                "processes": show(
                    f"{given.processes} processes", processes(given.processes, given.rounds)
                ),
            }
    except (DistError, subprocess.SubprocessError) as error:
        print(error, file=sys.stderr)
        return 1
    rows = [
        {"what": what, "rounds": {name: measurements.rounds for name, measurements in row.items()}}
        for what, row in found.items()
    ]
    report.save({"header": about, "rows": rows}, given.json)
    return 0


@contextlib.contextmanager
def as_installed() -> Iterator[None]:
    """Let new processes use compiled bytecode, as installed packages do."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = folder
        try:
            together([ranks_of(1)])  # compiles
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def show(what: str, row: Row) -> Row:
    """Print the measurements, compared with the first one."""
    (_, ours), *others = row.items()
    for number, (name, measurements) in enumerate(row.items()):
        text = f"{what + ': ' + name:<44} {measurements.median * 1e3:>10.2f}"
        print(text + (f" {ratio(ours, others[number - 1][1]):>10.2f}" if number else ""))
    sys.stdout.flush()
    return row


def imports(rounds: int) -> Row:
    """Time interpreters that only import."""
    programs = {
        "numpy and cydist": "import numpy, cydist",
        "numpy": "import numpy",
        "cydist": "import cydist",
        "nothing": NOTHING,
    }
    calls = {name: partial(together, [python(text)]) for name, text in programs.items()}
    return inprocess.run_in_process(calls, rounds, 1)


def processes(count: int, rounds: int) -> Row:
    """Time a whole job, from its launcher to its end, and as many interpreters."""
    calls: dict[str, Callable[[], object]] = {
        "cydistrun": partial(together, [ranks_of(count)]),
        "numpy": partial(together, [python("import numpy")] * count),
        "nothing": partial(together, [python(NOTHING)] * count),
    }
    return inprocess.run_in_process(calls, rounds, 1)


def ranks_of(count: int) -> list[str]:
    """Return the command of a job whose ranks only join it and leave it."""
    launcher = [sys.executable, "-m", "cydist.run", "--nproc-per-node", str(count)]
    return [*launcher, "--no-python", *python(RANK)]


def python(program: str) -> list[str]:
    """Return the command that runs a program."""
    return [sys.executable, "-c", program]


def together(commands: Sequence[Sequence[str]]) -> None:
    """Run commands at the same time until all end. Raises SubprocessError if one fails."""
    # The other interpreters must find cydist where this one does.
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    variables = os.environ | {"PYTHONPATH": paths}
    running = [subprocess.Popen(command, env=variables) for command in commands]

    def end() -> None:
        for process in running:
            process.kill()

    watchdog = threading.Timer(TIMEOUT, end)
    watchdog.start()
    try:
        for process in running:
            if code := process.wait():  # with a timeout it would poll, and notice the end late
                raise subprocess.CalledProcessError(code, process.args)
    finally:
        watchdog.cancel()
        end()
        for process in running:
            process.wait()


def joining(ranks: int, rounds: int, gloo: bool) -> dict[str, Row]:
    """Time init_process_group and new_group on the slowest rank, in new processes each round."""
    modules = {"cydist": "cydist"} | ({"gloo": "torch.distributed"} if gloo else {})
    joined: Row = {name: Measurements() for name in modules}
    grouped: Row = {name: Measurements() for name in modules}
    for _ in range(rounds):
        for name, module in modules.items():
            seconds = job(module, ranks)
            joined[name].rounds.append(max(join for join, _ in seconds))
            grouped[name].rounds.append(max(group for _, group in seconds))
    return {
        "init_process_group": show(f"init_process_group of {counted(ranks, 'rank')}", joined),
        "new_group": show(f"new_group of {counted(ranks, 'rank')}", grouped),
    }


def job(module: str, ranks: int) -> list[tuple[float, float]]:
    """Return the seconds of init_process_group and of a new_group, by rank."""
    context = multiprocessing.get_context("spawn")
    ready, said = context.Barrier(ranks), context.SimpleQueue()
    spawn(_rank, (module, ranks, ready, said), ranks)
    return [said.get() for _ in range(ranks)]


def _rank(_rank: int, module: str, ranks: int, ready: Any, said: Any) -> None:
    library: Any = importlib.import_module(module)
    ready.wait(TIMEOUT)
    clock = time.perf_counter
    start = clock()
    library.init_process_group("gloo")
    joined = clock() - start
    library.barrier()
    grouped = []
    for _ in range(NEW_GROUPS):
        start = clock()
        library.new_group(list(range(ranks)))
        grouped.append(clock() - start)
    said.put((joined, statistics.median(grouped)))
    library.barrier()
    library.destroy_process_group()
