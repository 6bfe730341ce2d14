"""torch's own tests of its backends, run for any backend by ranks that live through all of them.

    python tests/interop/torch_suite.py --backend cydist --ranks 3 [TEST ...]

The tests are those of torch.testing._internal.distributed.distributed_test, which is part of
torch. Many are meant for one backend by name; those of gloo, and those of MPI that need no MPI,
are opened for the backend under test by replacing the name in the module's text.
torch starts fresh processes for every test. Here they are started once, and make a fresh
process group for each test, so that importing torch does not take longer than the tests.

Prints a line per test that failed, and counts; the exit code is 1 if one failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import unittest
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType

MODULE = "torch.testing._internal.distributed.distributed_test"

# Conditions in the module's text, and what they become.
GATES = {
    'BACKEND == "mpi" or BACKEND == "gloo"': 'BACKEND in ("mpi", "gloo", OPENED)',
    'BACKEND != "gloo"': 'BACKEND not in ("gloo", OPENED)',
    'BACKEND != "mpi"': 'BACKEND not in ("mpi", OPENED)',
    'require_backend_is_available({"gloo"})': 'require_backend_is_available({"gloo", OPENED})',
}

# What is known to fail, and why; docs/dev/torch.md lists it.
GLOO_ONLY = "torch.distributed.monitored_barrier refuses every backend but gloo"
KNOWN = {
    "test_monitored_barrier_gloo": GLOO_ONLY,
    "test_monitored_barrier_gloo_subgroup": GLOO_ONLY,
    "test_monitored_barrier_failure_order": GLOO_ONLY,
    "test_monitored_barrier_wait_all_ranks": GLOO_ONLY,
    "test_monitored_barrier_gloo_rank_0_timeout": "it expects gloo's words",
}
SECONDS = 30  # that a call of the tests may take
LIMIT = 240  # that ranks wait for each other between tests


def open_suite(backend: str) -> ModuleType:
    """torch's module of tests, with the gates open for `backend`; gloo finds them as they are."""
    os.environ["BACKEND"] = backend
    from torch.testing._internal import common_distributed

    spec = importlib.util.find_spec(MODULE)
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).read_text()
    # torch runs what needs a part of the ranks on eight GPUs; here three ranks will do.
    common_distributed.skip_if_small_worldsize = lambda function: function
    if backend != "gloo":
        for feature in ("ddp", "subgroup", "cuda", "gpu", "plugin"):
            common_distributed.DistTestCases.backend_feature[feature].add(backend)
        for gate, opened in GATES.items():
            assert gate in text, f"torch's tests say {gate} no more"
            text = text.replace(gate, opened)
    module = ModuleType(MODULE)
    module.__file__ = spec.origin
    module.__dict__["OPENED"] = backend
    sys.modules[MODULE] = module
    exec(compile(text, spec.origin, "exec", dont_inherit=True), module.__dict__)
    return module


def names(suite: ModuleType) -> list[str]:
    """Every test of the module."""
    found = vars(suite.DistributedTest._DistTestBase)
    return sorted(name for name in found if name.startswith("test_"))


class Together:
    """What the ranks do together outside the group under test."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        import torch.distributed as dist

        self.rank, self.size = rank, size
        limit = timedelta(seconds=LIMIT)
        board = dist.FileStore(str(folder / "port"), size)
        if rank == 0:
            self.store = dist.TCPStore("127.0.0.1", 0, size, True, limit, wait_for_workers=False)
            board.set("port", str(self.store.port))
        else:
            self.store = dist.TCPStore("127.0.0.1", int(board.get("port")), size, False, limit)

    def meet(self, name: str, count: int | None = None) -> None:
        """Return when all, or so many, have called it with this name."""
        if self.store.add(f"{name}/count", 1) == (count or self.size):
            self.store.set(f"{name}/all", "")
        self.store.wait([f"{name}/all"])


def case(suite: ModuleType, name: str, together: Together) -> unittest.TestCase:
    """One test as this rank runs it."""

    class Case(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        passed = 0

        def _barrier(self, wait_for: int | None = None, timeout: float = 0) -> None:
            self.passed += 1
            together.meet(f"{name}/{self.passed}", wait_for)

    made = Case(name)
    made.rank = together.rank
    return made


def run(suite: ModuleType, name: str, backend: str, together: Together, folder: Path) -> str:
    """Run one test on this rank: "" for a pass, "skipped: REASON", or what failed."""
    import torch.distributed as dist
    from torch.testing._internal import common_distributed, common_utils

    test = case(suite, name, together)
    method = getattr(type(test), name)
    if getattr(method, "__unittest_skip__", False):
        return f"skipped: {method.__unittest_skip_why__}"
    os.environ["TEMP_DIR"] = str(folder / name)
    (folder / name / "test_dir").mkdir(parents=True, exist_ok=True)
    (folder / name / "barrier").mkdir(exist_ok=True)
    dist.init_process_group(
        backend, init_method=f"file://{folder / name / 'store'}", rank=together.rank,
        world_size=together.size,
        timeout=timedelta(seconds=suite.CUSTOM_PG_TIMEOUT.get(name, SECONDS)),
    )  # fmt: skip
    common_utils.set_rng_seed()
    ended = ""
    try:
        getattr(test, name)()
    except unittest.SkipTest as skip:
        ended = f"skipped: {skip}"
    except SystemExit as left:
        skips = common_distributed.TEST_SKIPS.values()
        reasons = [skip.message for skip in skips if skip.exit_code == left.code]
        ended = f"skipped: {reasons[0]}" if reasons else f"left with code {left.code}"
    except Exception:
        ended = traceback.format_exc()
        leave()  # a rank that waits for this rank learns that it will not come
    together.meet(f"{name}/end")
    leave()
    return ended


def leave() -> None:
    """End the test's groups, if there are any."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def serve(options: argparse.Namespace) -> None:
    """Be one rank: run every test, and say how each ended."""
    together = Together(options.rank, options.ranks, options.folder)
    os.environ["INIT_METHOD"] = f"file://{options.folder / 'again'}"
    suite = open_suite(options.backend)
    results = options.folder / f"{options.rank}.jsonl"
    for name in options.tests or names(suite):
        together.meet(f"{name}/begin")
        began = time.monotonic()
        ended = run(suite, name, options.backend, together, options.folder)
        with results.open("a") as file:
            print(json.dumps([name, ended, time.monotonic() - began]), file=file)
    together.meet("over")


def start(options: argparse.Namespace) -> int:
    """Start the ranks, wait for them, and print what they found; the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *options.tests, "--backend", options.backend]
        command += ["--ranks", str(options.ranks), "--folder", folder]
        environ = {"WORLD_SIZE": str(options.ranks), "OMP_NUM_THREADS": "1"}
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        output = None if options.verbose else subprocess.DEVNULL
        ranks = [
            subprocess.Popen(
                [*command, "--rank", str(rank)],
                env=os.environ | environ, stdout=output, stderr=output,
            )
            for rank in range(options.ranks)
        ]  # fmt: skip
        try:
            codes = [rank.wait(options.limit) for rank in ranks]
        except subprocess.TimeoutExpired:
            codes = [None]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        return report(
            options, [Path(folder) / f"{rank}.jsonl" for rank in range(len(ranks))], codes
        )


def report(options: argparse.Namespace, files: list[Path], codes: Sequence[int | None]) -> int:
    """Print what failed, and how many tests ended how."""
    found: dict[str, list[tuple[str, float]]] = {}
    for file in files:
        for line in file.read_text().splitlines() if file.exists() else []:
            name, ended, seconds = json.loads(line)
            found.setdefault(name, []).append((ended, seconds))
    counts: Counter[str] = Counter()
    for name, ends in found.items():
        outcome, why = judge(name, [ended for ended, _ in ends], options)
        counts[outcome] += 1
        if outcome == "failed" or options.verbose:
            print(f"{outcome}  {name}  {max(seconds for _, seconds in ends):.1f} s")
            print("    " + why.strip().replace("\n", "\n    "))
    print(
        f"{options.backend}, {options.ranks} ranks: "
        + ", ".join(f"{counts[each]} {each}" for each in ("passed", "failed", "known", "skipped"))
    )
    whole = all(code == 0 for code in codes)
    if not whole:
        print(f"the ranks left with {codes}")
    return 0 if whole and not counts["failed"] else 1


def judge(name: str, ends: list[str], options: argparse.Namespace) -> tuple[str, str]:
    """How a test ended over all ranks, and why."""
    bad = [ended for ended in ends if ended and not ended.startswith("skipped")]
    skips = [ended for ended in ends if ended.startswith("skipped")]
    known = KNOWN.get(name, "") if options.backend == "cydist" else ""
    if bad:
        return ("known", known) if known else ("failed", bad[0])
    if len(ends) < options.ranks:
        return "failed", "a rank was lost in it"
    if len(skips) == len(ends):
        return "skipped", skips[0]
    return ("failed", "it passes, though it is listed in KNOWN") if known else ("passed", "")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("tests", nargs="*", metavar="TEST", help="default: all")
    parser.add_argument("--backend", default="cydist")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--limit", type=float, default=900, help="seconds for all tests")
    parser.add_argument("--verbose", action="store_true", help="also what passed, and the output")
    for name, kind in (("rank", int), ("folder", Path)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is None:
        return start(options)
    if options.backend == "cydist":
        importlib.import_module("cydist.interop.torch")
    serve(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
