"""Groups and ranks: making them, asking about them, ending them."""

import copy
import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest
from transport_ranks import free_port

import cydist as dist
from cydist.groups import registry
from cydist.testing import run_threads


def test_nothing_works_before_init():
    """Calls and queries say that init_process_group comes first."""
    assert not dist.is_initialized()
    assert None is dist.group.WORLD
    for call in (dist.get_rank, dist.get_world_size, dist.barrier, dist.get_backend):
        with pytest.raises(ValueError, match="init_process_group"):
            call()


def test_init_twice_raises_and_destroy_allows_another(backend):
    """A second init raises; after destroy the thread can join another job."""

    def body(rank):
        with pytest.raises(ValueError, match="twice"):
            dist.init_process_group("inproc", rank=0, world_size=1, store=dist.HashStore())
        dist.destroy_process_group()
        assert not dist.is_initialized()
        dist.init_process_group("inproc", rank=0, world_size=1, store=dist.HashStore())
        x = np.ones(1)
        dist.all_reduce(x)
        return dist.get_world_size()

    assert [1, 1] == run_threads(body, 2, backend)


def test_a_group_keeps_the_device_that_it_was_given():
    """As `bound_device_id`, where torch's users and libraries look for it."""

    def body(rank):
        dist.destroy_process_group()
        dist.init_process_group(
            "inproc", rank=0, world_size=1, store=dist.HashStore(), device_id="cuda:3"
        )
        groups = dist.group.WORLD, dist.new_group([0], device_id=7), dist.new_group([0])
        return [group.bound_device_id for group in groups]

    assert [["cuda:3", 7, None]] == run_threads(body, 1)


@pytest.mark.parametrize("take", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_group_is_of_its_process(take):
    """Pickling and copying a group say what to send in its place; the group stays usable."""

    def body(rank):
        with pytest.raises(TypeError, match="get_process_group_ranks"):
            take(dist.group.WORLD)
        dist.barrier()

    run_threads(body, 2)


def test_without_a_launcher_the_error_names_what_works_there():
    """In a notebook the error names a job of one rank, and ranks that are threads."""
    with pytest.raises(ValueError, match=r"world_size=1 .* cydist\.testing\.run_threads"):
        dist.init_process_group("tcp")


def test_a_call_on_a_foreign_group_warns_once():
    """A non-member's call does nothing and says so the first time."""
    from cydist.api.process_groups import NonMember

    foreign = NonMember()
    with pytest.warns(UserWarning, match="all_reduce on a group that this rank is not in"):
        assert None is dist.all_reduce(np.ones(1), group=foreign)
    with warnings.catch_warnings(record=True) as again:
        warnings.simplefilter("always")
        dist.all_reduce(np.ones(1), group=foreign)
    assert [] == again


def test_local_synchronization_needs_only_the_members(jobs, backend):
    """use_local_synchronization: the third rank does not call at all."""

    def body(rank):
        if rank == 2:
            return None
        group = dist.new_group([0, 1], use_local_synchronization=True)
        x = np.ones(2)
        dist.all_reduce(x, group=group)
        return x[0]

    assert [2.0, 2.0, None] == jobs.get(backend, 3).run(body)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ranks": [0, 9]}, "0 to 1"),
        ({"ranks": [1, 1]}, "rank 1 is listed twice"),
        ({"ranks": []}, "at least one"),
        ({"backend": "nonsense"}, "no backend is called"),
        ({"backend": "cpu:tcp,cpu:tcp"}, "twice"),
        ({"backend": "cpu"}, "no backend is called"),
    ],
    ids=lambda value: str(value),
)
def test_new_group_refuses_wrong_arguments(jobs, arguments, words):
    """Unknown ranks, doubled ranks, unknown backends: ValueError, the world goes on."""

    def body(rank):
        with pytest.raises(ValueError, match=words):
            dist.new_group(**arguments)
        dist.barrier()

    jobs.get("inproc", 2).run(body)


@pytest.mark.parametrize(
    "arguments",
    [{"timeout": -1}, {"timeout": "1"}, {"ranks": [0.0, 1.0]}, {"ranks": 1}, {"ranks": "01"}],
    ids=lambda value: str(value),
)
def test_a_refused_new_group_does_not_count(jobs, arguments):
    """Rank 0 alone makes a mistake, and corrects it: the ranks have one group."""

    def body(rank):
        if rank == 0:
            with pytest.raises((TypeError, ValueError)):
                dist.new_group(**arguments)
        group = dist.new_group()
        return group.group_name

    first, second = jobs.get("inproc", 2).run(body)
    assert first == second


def test_a_new_group_does_not_wait_longer_than_its_timeout(jobs):
    """Its first rank never comes; the store itself would wait for minutes."""

    def body(rank):
        if rank == 0:
            return None
        with pytest.raises(dist.StoreTimeoutError, match=r"timeout after 0\.[12]"):
            dist.new_group(backend="gloo", timeout=0.2)
        return rank

    assert [None, 1] == run_threads(body, 2, "tcp", timeout=60)


@pytest.mark.parametrize("wrong", [[0], 0, "x"], ids=str)
@pytest.mark.parametrize(
    "call",
    [
        dist.get_rank,
        dist.get_world_size,
        dist.get_backend,
        dist.get_process_group_ranks,
        dist.destroy_process_group,
        dist.abort,
        lambda group: dist.get_group_rank(group, 0),
        lambda group: dist.get_global_rank(group, 0),
    ],
    ids=["rank", "size", "backend", "ranks", "destroy", "abort", "group rank", "global rank"],
)
def test_what_is_no_group_is_refused(jobs, call, wrong):
    """TypeError, and the job goes on: a list of ranks is not taken for a group."""

    def body(rank):
        with pytest.raises(TypeError, match="group must come from cydist's new_group"):
            call(wrong)
        return dist.get_world_size()

    assert [2, 2] == jobs.get("inproc", 2).run(body)


def test_ranks_of_the_default_group_and_of_a_foreign_one(jobs):
    """None means the default group; of a group that this rank is not in nothing is known."""

    def body(rank):
        for call in (dist.get_group_rank, dist.get_global_rank):
            assert call(None, 1) == 1
            with pytest.raises(ValueError, match="this rank is not in the group"):
                call(dist.GroupMember.NON_GROUP_MEMBER, 1)

    jobs.get("inproc", 2).run(body)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("all_reduce", lambda: dist.all_reduce(np.ones(1), timeout=-1)),
        ("recv", lambda: dist.recv(np.ones(1), 1 - dist.get_rank(), timeout=-1)),
        ("new_group", lambda: dist.new_group(timeout=-1)),
        ("monitored_barrier", lambda: dist.monitored_barrier(timeout=-1)),
        ("wait", lambda: dist.all_reduce(np.ones(1), async_op=True).wait(-1)),
    ],
)
def test_a_wrong_timeout_names_its_call(jobs, name, call):
    """ValueError that begins with the call, which has not begun."""

    def body(rank):
        with pytest.raises(ValueError, match=f"^{name}: timeout must be 0 seconds or more"):
            call()
        dist.barrier()

    jobs.get("inproc", 2).run(body)


def test_local_groups_are_the_same_however_their_ranks_are_spelled(jobs):
    """The members' numbers count, not whose integers they are."""

    def body(rank):
        ranks = [0, 1] if rank == 0 else list(np.arange(2))
        return dist.new_group(ranks, use_local_synchronization=True).group_name

    first, second = jobs.get("inproc", 2).run(body)
    assert first == second


def test_an_array_on_a_device_that_nobody_copies_from_is_refused(jobs):
    """Without cupy and torch the error says what is missing; the group goes on."""

    class OnGpu:
        __cuda_array_interface__ = {  # noqa: RUF012
            "version": 3, "shape": (3,), "typestr": "<f4", "data": (4096, False), "strides": None,
        }  # fmt: skip

    def body(rank):
        for call in (dist.all_reduce, lambda x: dist.isend(x, 1 - rank)):
            with pytest.raises(dist.UnsupportedError, match="cuda:0, and neither cupy nor torch"):
                call(OnGpu())
        dist.barrier()

    jobs.get("inproc", 2).run(body)


def test_a_registered_backend_is_found_by_name(monkeypatch):
    """Both call forms; a name is registered once; a wrong product is refused."""
    monkeypatch.setattr(registry, "_plugins", dict(registry._plugins))
    for name in ("PLAIN", "EXTENDED"):
        monkeypatch.setattr(dist.Backend, name, None, raising=False)
    seen = []

    def plain(store, rank, world_size, timeout):
        seen.append((rank, world_size, timeout.total_seconds()))
        return dist.ProcessGroup(rank, world_size)

    def extended(options, pg_options):
        seen.append((options.group_rank, pg_options))
        return object()

    dist.register_backend("plain", plain, devices=["cpu"])
    dist.Backend.register_backend("Extended", extended, True, "cpu")
    assert "plain" == dist.Backend.PLAIN
    with pytest.raises(ValueError, match="registered already"):
        dist.register_backend("PLAIN", plain)

    def body(rank):
        assert "plain" == dist.get_backend()
        with pytest.raises(dist.UnsupportedError, match=r"no cydist\.ProcessGroup"):
            dist.new_group(backend="extended", pg_options="x")

    run_threads(body, 1, "plain", timeout=30)
    assert [(0, 1, 30.0), (0, "x")] == seen


@pytest.mark.parametrize("backend", ["inproc", "tcp"])
def test_options_that_a_backend_does_not_have(backend):
    """The group is made, and a warning says that they are ignored."""

    def body(rank):
        group = dist.new_group(pg_options="fast")
        x = np.ones(1)
        dist.all_reduce(x, group=group)
        assert x == 2

    # Outside the threads, for which warnings are caught together.
    with pytest.warns(RuntimeWarning, match="has no options: pg_options is ignored, 'fast'"):
        run_threads(body, 2, backend)


def test_backend_names():
    """Backend is a lower-case string."""
    assert "gloo" == dist.Backend("GLOO")
    assert "tcp" == dist.Backend.TCP
    with pytest.raises(ValueError, match="a string"):
        dist.Backend(3)
    assert {"cpu": "tcp", "cuda": "tcp"} == registry.parse("tcp")


def test_an_error_that_is_kept_does_not_hold_the_port_of_a_job_that_is_over():
    """init after destroy, at the same port, while an error refers to the world before."""
    script = (
        "import sys, cydist as d\n"
        "def init(): d.init_process_group('tcp', init_method=sys.argv[1], rank=0, world_size=1)\n"
        "init()\n"
        "try:\n    d.new_group([0, 9])\n"
        "except ValueError as error:\n    kept = error\n"
        "d.destroy_process_group(); init(); print(d.get_world_size())\n"
    )
    url = f"tcp://127.0.0.1:{free_port()}"
    command = [sys.executable, "-c", script, url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "1\n", done.stderr


def test_the_process_has_one_world():
    """Without threads as ranks: init, use and destroy in a fresh process."""
    script = (
        "import numpy, cydist as d\n"
        "d.init_process_group('tcp', rank=0, world_size=1, store=d.HashStore())\n"
        "x = numpy.ones(2); d.all_reduce(x); print(x.sum(), d.get_rank())\n"
        "d.destroy_process_group(); print(d.is_initialized())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert "2.0 0\nFalse\n" == done.stdout


def test_the_default_group_goes_by_both_names():
    """torch has it as group.WORLD and as GroupMember.WORLD."""

    def body(rank):
        return dist.GroupMember.WORLD is dist.group.WORLD is not None

    assert [True] == run_threads(body, 1)
