"""Backends by kind of memory: "cpu:tcp,cuda:other", and one backend for several kinds."""

import numpy as np
import pytest

import cydist as dist
from cydist import registry
from cydist.backends import host
from cydist.testing import run_threads

made = []


def _create(options, pg_options):
    made.append(options.group_id)
    return host.create_inproc(options)


@pytest.fixture(scope="module")
def both():
    """A backend that takes memory of two kinds (it is only ever given CPU arrays here)."""
    registry.register_backend("both", _create, extended_api=True)
    return "both"


def test_one_group_serves_all_kinds_of_memory_of_a_backend(both):
    """Its creator is called once for a group, not once for a kind."""
    made.clear()
    run_threads(lambda rank: dist.barrier(), 1, both)
    assert ["0"] == made


@pytest.mark.parametrize("call", [dist.barrier, dist.monitored_barrier], ids=lambda f: f.__name__)
def test_calls_without_an_array_work_where_kinds_have_backends_of_their_own(both, call):
    """A barrier runs on the first of them."""

    def body(rank):
        assert "cpu:inproc,cuda:both" == dist.get_backend()
        call()
        x = np.ones(2)
        dist.all_reduce(x)
        group = dist.new_group([0, 1])
        call(group)
        return x[0]

    assert [2.0, 2.0] == run_threads(body, 2, "cpu:inproc,cuda:both")
