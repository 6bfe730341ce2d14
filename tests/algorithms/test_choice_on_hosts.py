"""Which algorithms calls take on several hosts."""

import time

import numpy as np
import pytest
from collective_cases import choose_for_part
from hierarchical_cases import ROWS
from transport_ranks import Ranks as TransportRanks

from cydist import _native
from cydist.tuning import table as tuning_table


def chosen(collective, nbytes, hosts, consecutive, placement="", ranks=4):
    return collective, tuning_table.choose(
        collective, nbytes, ranks, False, even=True, commutative=True, hosts=hosts,
        consecutive=consecutive, placement=placement,
    )  # fmt: skip


@pytest.mark.parametrize("nbytes", [8, 1 << 16, 1 << 24])
@pytest.mark.parametrize("collective", tuning_table.COLLECTIVES[1:])
def test_hosts_with_several_ranks_are_used(collective, nbytes):
    """The table takes hierarchical algorithms where ranks share hosts, and only there."""
    assert chosen(collective, nbytes, True, True) in ROWS
    assert chosen(collective, nbytes, False, False) not in ROWS


@pytest.mark.parametrize(
    ("collective", "fewest"),
    [("all_reduce", 6), ("all_gather", 5), ("reduce_scatter", 5), ("all_to_all", 5)],
)
def test_more_ranks_have_leaders_for_longer_calls(collective, fewest):
    """Up to 64 KiB, in place of 32."""
    for ranks in range(4, 9):
        longest = 1 << 16 if ranks >= fewest else 1 << 15
        for nbytes, name in ((longest, "leaders"), (longest + 1, "lanes")):
            assert chosen(collective, nbytes, True, True, ranks=ranks)[1] == name


@pytest.mark.parametrize("library", ["Open MPI", "MPICH"])
@pytest.mark.parametrize("nbytes", [8, 1 << 24])
@pytest.mark.parametrize("collective", tuning_table.IN_LIBRARIES)
def test_hosts_come_before_a_library(collective, nbytes, library):
    """Over several hosts a library carries messages; on one rank per host it has its own."""
    name = tuning_table.choose(
        collective, nbytes, 4, False, even=True, commutative=True, library=library, hosts=True
    )
    assert (collective, name) in ROWS


@pytest.mark.parametrize("collective", tuning_table.COLLECTIVES[1:])
def test_scans_need_consecutive_ranks(collective):
    """Other collectives are hierarchical wherever the ranks are."""
    assert (chosen(collective, 8, True, False) in ROWS) == ("scan" not in collective)


def test_rows_measured_on_one_host_do_not_hold_on_several():
    """What --tune found over TCP on one host leaves hierarchical algorithms alone."""
    rule = tuning_table.Rule("all_reduce", "ring")
    tuning_table.use_rules({("all_reduce", 4, False, ""): [rule]}, {})
    try:
        assert chosen("all_reduce", 8, False, False) == ("all_reduce", "ring")
        assert chosen("all_reduce", 8, False, False, "4x1") == ("all_reduce", "ring")
        assert chosen("all_reduce", 8, True, True, "2x2") == ("all_reduce", "leaders")
    finally:
        tuning_table.use_rules({}, {})


def test_rows_measured_on_several_hosts_hold_for_their_placement():
    """Results of --tune on two hosts of two ranks count there, and on no other placement."""
    rule = tuning_table.Rule("all_reduce", "lanes")
    shipped = ("all_reduce", "leaders")
    tuning_table.use_rules({("all_reduce", 4, False, "2x2"): [rule]}, {})
    try:
        assert chosen("all_reduce", 8, True, True, "2x2") == ("all_reduce", "lanes")
        assert chosen("all_reduce", 8, True, False, "2x2 scattered") == shipped
        assert chosen("all_reduce", 8, True, True, "3+1") == shipped
        assert chosen("all_reduce", 8, False, False) not in ROWS
    finally:
        tuning_table.use_rules({}, {})


@pytest.mark.parametrize(
    ("collective", "nbytes", "ranks", "between_hosts", "expected"),
    [
        ("broadcast", 1 << 15, 3, True, b"tree"),
        ("broadcast", 1 << 24, 2, True, b"tree"),
        ("broadcast", 1 << 16, 3, True, b"ring"),
        ("broadcast", 1 << 19, 3, True, b"ring"),
        ("broadcast", 1 << 23, 4, True, b"ring"),
        ("broadcast", 1 << 19, 5, True, b"tree"),
        ("broadcast", 1 << 23, 3, False, b"tree"),
        ("all_reduce", 1 << 14, 3, True, b"doubling"),
        ("all_reduce", 1 << 15, 3, True, b"ordered_scatter"),
        ("all_reduce", 1 << 18, 3, True, b"ordered_scatter"),
        ("all_reduce", 1 << 19, 3, True, b"ring"),
        ("all_reduce", 1 << 15, 3, False, b"doubling"),
        ("all_reduce", 1 << 16, 3, False, b"ring"),
        ("all_reduce", 1 << 15, 4, True, b"doubling"),
        ("all_reduce", 1 << 16, 4, True, b"halving_doubling"),
    ],
)
def test_no_host_sends_a_long_array_twice(collective, nbytes, ranks, between_hosts, expected):
    """Between a few hosts, as a tree's root and one of three doubling ranks would. Inside a host,
    or on more of them, it is not worth the steps. A whole group does so, too, if each of its ranks
    is on a host of its own."""
    assert choose_for_part(collective, nbytes, ranks, False, between_hosts)[0] == expected
    name = tuning_table.choose(
        collective, nbytes, ranks, False, even=True, commutative=True,
        placement=f"{ranks}x1" if between_hosts else "",
    )  # fmt: skip
    assert name.encode() == expected


def test_groups_on_one_host_do_not_take_what_is_kept_for_several():
    """Both have three ranks, and their process keeps one table for alike groups."""
    nbytes, segment = 1 << 19, 1 << 18
    (link, *_) = TransportRanks("inproc", 3).links
    apart, together = (_native.Group(link, [0, 1, 2], 0, number) for number in (1, 2))
    apart.place_on_hosts([0, 1, 2])
    together.place_on_hosts([0, 0, 0])
    apart.keep_choice("broadcast", nbytes, b"ring", b"", segment)
    together.keep_choice("broadcast", 8, b"tree", b"", segment)
    array = _native.asarray(np.zeros(nbytes, np.uint8))
    call = _native.CallRecord("broadcast", 1, time.monotonic() + 1)
    ran = together.run_as_chosen(call, "broadcast", [array], [array], nbytes, 0, None, 1, nbytes, 0)
    assert not ran


@pytest.mark.parametrize(
    ("hosts", "placement"),
    [
        ([0, 0, 0], ""),
        ([0, 1], "2x1"),
        ([7, 7, 2, 2], "2x2"),
        ([0, 1, 0, 1], "2x2 scattered"),
        ([1, 0, 0, 0], "3+1"),
        ([0, 0, 0, 1], "3+1"),
        ([0, 1, 1, 2], "2+2x1"),
        ([0, 1, 1, 0], "2x2 scattered"),
    ],
)
def test_placements_have_names(hosts, placement):
    """The sizes of the hosts count, not their order, and whether their ranks are consecutive."""
    assert tuning_table.placement_of(hosts) == placement
    if placement:
        assert tuning_table.ranks_in(placement) == len(hosts)
