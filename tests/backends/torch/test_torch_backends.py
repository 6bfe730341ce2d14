"""torch's backends under our name: "torch:gloo", and those that others bring to torch."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from extra_values import more

import cydist as dist
from cydist import asarray
from cydist.groups import registry
from cydist.testing import ThreadJob, run_threads

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[3]
NAME = "torch:gloo"


def suite(name: str, *options: str) -> str:
    """The last line of the contract tests on a backend."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "_cydist_pytest", "--pyargs"]
    command += ["cydist.testing", "--cydist-backend", name, "-p", "no:cacheprovider", *options]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=250, check=False, cwd="/",
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    return result.stdout.strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "options", [["-k", "2ranks and collectives"], *more([])], ids=["2 ranks", "all"]
)
def test_gloo_does_what_a_backend_must(options: list[str]) -> None:
    """The contract tests pass: all collectives, dtypes, layouts, mismatches, messages, timeouts."""
    assert " passed" in suite(NAME, *options)


# Names.


@pytest.mark.parametrize("spec", [NAME, "TORCH:Gloo", f"cpu:{NAME}"])
def test_a_name_of_a_family_is_a_backends_name(spec: str) -> None:
    """Alone, and behind a device."""
    assert {"cpu": NAME} == registry.parse(spec)
    assert dist.is_backend_available(NAME)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("torch:nosuch", "torch has no backend called 'nosuch' here; it has .*gloo"),
        ("torch:", "no backend is called 'torch:'.*torch:NAME"),
        ("torch", "no backend is called 'torch'.*torch:NAME"),
        (f"cuda:{NAME}", "takes arrays on cpu, not cuda"),
        (f"{NAME},cuda:tcp", "'torch:gloo' .* names no device: write cpu:torch:gloo"),
    ],
)
def test_wrong_names_are_refused(spec: str, words: str) -> None:
    """Before anybody waits, with what there is."""
    with pytest.raises(ValueError, match=words):
        registry.parse(spec)
    assert not dist.is_backend_available(spec)


def test_without_torch_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """UnsupportedError, and the name is not available."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(dist.UnsupportedError, match="needs torch: pip install torch"):
        registry.parse(NAME)
    assert not dist.is_backend_available(NAME)


# What torch does, and what we do.


class Recorded:
    """torch's group, and the names of its methods that were called."""

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.called.append(name)
        return getattr(self._theirs, name)


def recorded(call: Any, size: int = 2) -> set[str]:
    """torch's methods that `call(rank)` came to, besides the comparing of calls."""

    def body(rank: int) -> set[str]:
        group: Any = dist.group.WORLD
        group._theirs = recorder = Recorded(group._theirs)
        call(rank)
        return set(recorder.called)

    first, *_ = run_threads(body, size, NAME)
    return first - {"send", "recv"}


X = np.ones(4, "f4")
OWN = {
    "all_reduce": (lambda r: dist.all_reduce(X.copy()), "allreduce"),
    "all_reduce of bool": (lambda r: dist.all_reduce(X > 0), "allreduce"),
    "broadcast": (lambda r: dist.broadcast(X.copy(), 0), "broadcast"),
    "reduce": (lambda r: dist.reduce(X.copy(), 0), "reduce"),
    "all_gather": (lambda r: dist.all_gather([X.copy(), X.copy()], X), "_allgather_base"),
    "all_to_all": (lambda r: dist.all_to_all_single(X.copy(), X), "alltoall_base"),
    "reduce_scatter": (
        lambda r: dist.reduce_scatter_tensor(X[:2].copy(), X),
        "_reduce_scatter_base",
    ),
    "gather": (lambda r: dist.gather(X, None if r else [X.copy(), X.copy()], 0), "gather"),
    "scatter": (lambda r: dist.scatter(X.copy(), None if r else [X, X], 0), "scatter"),
}
DERIVED = {
    "int16": lambda r: dist.all_reduce(np.ones(4, "i2")),
    "float8": lambda r: dist.all_reduce(torch.ones(4).to(torch.float8_e4m3fn)),
    "MAX of floats": lambda r: dist.all_reduce(X.copy(), dist.ReduceOp.MAX),
    "AVG": lambda r: dist.all_reduce(X.copy(), dist.ReduceOp.AVG),
    "uneven": lambda r: dist.all_gather([np.ones(1), np.ones(2)], np.ones(r + 1)),
    "scan": lambda r: dist.scan(X.copy()),
}


@pytest.mark.parametrize(("call", "method"), OWN.values(), ids=OWN)
def test_what_gloo_has_is_gloos(call: Any, method: str) -> None:
    """The collective is torch's own."""
    assert method in recorded(call)


@pytest.mark.parametrize("call", DERIVED.values(), ids=DERIVED)
def test_what_gloo_lacks_is_derived(call: Any) -> None:
    """Reductions travel in messages; what has been reduced may be gathered by gloo."""
    assert recorded(call) <= {"_allgather_base"}


def test_deterministic_sums_of_floats_are_derived(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo adds in an order of its own."""
    monkeypatch.setenv("CYDIST_DETERMINISTIC", "1")
    assert {"_allgather_base"} == recorded(lambda r: dist.all_reduce(X.copy()))


def test_memory_is_not_copied() -> None:
    """torch writes into the array that the user passed, and the array lives as long as torch's
    tensor."""
    from cydist.backends.torch.work import tensor_of

    x = np.zeros(5, "f4")
    first, second = asarray(x).split([2, 3])
    tensor = tensor_of([first, second], torch.float32)
    del first, second
    tensor.fill_(7)
    assert [7.0] * 5 == x.tolist()


def test_tags_that_share_one_of_gloos_are_not_mixed_up() -> None:
    """A message whose tag differs by the number of gloo's tags raises, it is not taken."""
    from cydist.backends.torch.work import TAGS

    def body(rank: int) -> None:
        if rank == 0:
            dist.isend(np.ones(1), 1, tag=3)
            with pytest.raises(dist.DistError):
                dist.recv(np.ones(1), 1)  # until the group has failed
        else:
            with pytest.raises(dist.UnsupportedError, match=f"tag {3 + TAGS}: .* tag 3 came"):
                dist.recv(np.ones(1), 0, tag=3 + TAGS)

    run_threads(body, 2, NAME)


def test_long_messages_of_one_tag_keep_their_order() -> None:
    """Threads take what follows the headers, and do not mix it up."""

    def body(rank: int) -> list[Any]:
        works: list[Any] = []
        into = [np.zeros(3000) for _ in range(40)]
        if rank == 0:
            works = [dist.isend(np.full(3000, float(i)), 1, tag=4) for i in range(40)]
        else:
            works = [dist.irecv(each, 0, tag=4) for each in into]
        for work in works:
            work.wait()
        return [each.min() == each.max() == i for i, each in enumerate(into)]

    with ThreadJob(2, NAME) as job:
        for _ in range(5):
            assert all(job.run(body)[1])


def test_nothing_is_pickled_on_connections_that_anybody_could_make() -> None:
    """gloo's are not authenticated: neither side pickles, plain values travel."""

    def body(rank: int) -> Any:
        kind, why = (TypeError, "needs pickle") if rank else (dist.DistBackendError, "rank 1 could")
        with pytest.raises(kind, match=why):
            dist.all_gather_object([None] * 2, Path("x") if rank else 0)
        if rank:
            pickled = np.frombuffer(b"\x01" + pickle.dumps(Path("x")), np.uint8).copy()
            for each in (np.array([1]), np.array([pickled.size]), pickled):
                dist.send(each, 0)
        else:
            with pytest.raises(TypeError, match="pickle is switched off here"):
                dist.recv_object_list([None], 1)
        gathered = [None] * 2
        dist.all_gather_object(gathered, {"rank": rank})
        return gathered

    assert [[{"rank": 0}, {"rank": 1}]] * 2 == run_threads(body, 2, NAME)


# The ends of ranks and groups.


def test_what_was_sent_before_destroy_arrives() -> None:
    """Also when nobody holds its Work, and its receiver comes later."""

    def body(rank: int) -> float:
        group, x = dist.new_group(), np.zeros(1000)
        if rank == 0:
            dist.isend(np.ones(1000), 1, group=group)
            dist.destroy_process_group(group)
        else:
            dist.recv(x, 0, group=group)
        return x.sum()

    assert [0, 1000] == run_threads(body, 2, NAME)


@pytest.mark.parametrize("call", [dist.barrier, lambda: dist.recv(np.ones(1), 0)])
def test_a_timeout_is_told_to_the_others(call: Any) -> None:
    """Rank 0 gives up in a call that rank 1 never enters; rank 1, in another, learns it at once."""

    def body(rank: int) -> str:
        if rank == 0:
            with pytest.raises(dist.DistTimeoutError, match=r"after 0.2 s waiting for rank 1"):
                dist.recv(np.ones(1), 1, tag=9, timeout=0.2)
            return ""
        with pytest.raises(
            dist.DistTimeoutError, match="rank 0 gave up waiting for rank 1"
        ) as error:
            call()
        return str(error.value)

    with ThreadJob(2, NAME, timeout=50) as job:
        assert "in recv" in job.run(body)[1]


def test_destroy_ends_what_is_under_way() -> None:
    """The Work of a receive that nobody served raises GroupDestroyedError."""

    def body(rank: int) -> None:
        group = dist.new_group()
        work = dist.irecv(np.ones(1), 1 - rank, group=group)
        assert work is not None
        dist.destroy_process_group(group)
        with pytest.raises(dist.DistError):
            work.wait(20)
        dist.barrier()  # the default group still works

    run_threads(body, 2, NAME)


def test_third_party_backends_of_torch_are_found() -> None:
    """Whatever is registered with torch works: here one that is cydist again."""
    import torch.distributed

    import cydist.interop.torch

    def plain(store: Any, rank: int, size: int, timeout: Any) -> Any:
        options = torch.distributed.distributed_c10d._DistributedBackendOptions()
        options.store, options.group_rank, options.group_size = store, rank, size
        options.timeout, options.group_id, options.global_ranks_in_group = timeout, "7", [0, 1]
        return cydist.interop.torch.create(options)

    torch.distributed.Backend.register_backend("plain", plain, devices=["cpu"])
    x = np.arange(600.0)

    def body(rank: int) -> tuple[Any, ...]:
        mine, got = x * (rank + 1), np.zeros(600)
        dist.all_reduce(mine)
        gathered = np.zeros(4, "i2")
        dist.all_gather_into_tensor(gathered, np.full(2, rank, "i2"))
        sending = dist.isend(mine, 1 - rank)
        dist.recv(got, 1 - rank)
        assert sending is not None
        sending.wait()
        return dist.get_backend(), (mine == got).all(), mine[1], gathered.tolist()

    for name in ("torch:cydist", "torch:plain"):
        assert [(name, True, 3.0, [0, 0, 1, 1])] * 2 == run_threads(body, 2, name)


PROGRAM = """
import os, signal, sys, threading
import numpy as np
import cydist as dist

def begin():
    dist.init_process_group("torch:gloo", timeout=50)
    dist.barrier()

begin()
rank = dist.get_rank()
if rank == 0:
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        dist.recv(np.ones(1), 1)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
else:
    try:
        dist.barrier()
    except dist.DistError as error:
        print(error, flush=True)
dist.destroy_process_group()
begin()
if rank == 1 and sys.argv[1] == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "dies":
    try:
        dist.all_reduce(np.ones(1))
    except dist.PeerFailedError as error:
        print(error, flush=True)
else:
    group = dist.new_group()
    work = dist.irecv(np.ones(1), 1 - rank)
    if rank == 1:
        started = dist.all_reduce(np.ones(1), group=group, async_op=True)
print("leaving", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["dies", *more("leaves")])
def test_ranks_may_be_interrupted_die_and_leave(tmp_path: Path, end: str) -> None:
    """Ctrl-C ends a wait, and the others hear of it; the death of a rank is a PeerFailedError;
    who leaves with calls under way ends without a signal."""
    (tmp_path / "program.py").write_text(PROGRAM)
    result = subprocess.run(
        [sys.executable, "-m", "cydist.run", "--nproc-per-node", "2", "program.py", end],
        capture_output=True, text=True, timeout=50, check=False, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    said = result.stdout + result.stderr
    assert "interrupted" in result.stdout, said
    assert "rank 0 was interrupted in recv" in result.stdout, said
    if end == "dies":
        assert "rank 1 (local rank 1" in result.stderr, said
        assert "SIGKILL" in result.stderr, said
    else:
        assert result.returncode == 0, said
        assert result.stdout.count("leaving") == 2, said


def test_what_was_chosen() -> None:
    """A group says for logs whose transport it uses."""

    def body(rank: int) -> dict[str, str]:
        group = dist.group.WORLD
        assert group is not None
        return group.chosen()

    assert run_threads(body, 2, NAME) == [{"transport": "torch's gloo"}] * 2
