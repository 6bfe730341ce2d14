"""Which algorithm is chosen, and by what."""

import pytest

from cydist._native import algorithms
from cydist.tuning import table as tuning_table

COLLECTIVES = tuning_table.COLLECTIVES[1:]
CALLS = [
    {
        "nbytes": nbytes, "ranks": ranks,
        "windows": windows, "even": even, "commutative": commutative,
    }
    for nbytes in (0, 4097, 1 << 33)
    for ranks in (3, 8)
    for windows in (False, True)
    for even in (False, True)
    for commutative in (False, True)
]  # fmt: skip


@pytest.fixture
def environment(monkeypatch):
    """environment(NAME=value): settings that tuning reads now; forgotten afterwards."""

    def change(**settings):
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        tuning_table.reload()

    change()
    return change


def chosen(
    collective, nbytes, ranks, *, windows=False, even=True, commutative=True, library="",
    placement="",
):  # fmt: skip
    return tuning_table.choose(
        collective, nbytes, ranks, windows, even=even, commutative=commutative, library=library,
        placement=placement,
    )  # fmt: skip


@pytest.mark.parametrize("deterministic", ["0", "1"], ids=["free", "deterministic"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_call_gets_an_algorithm_that_can_run(environment, collective, deterministic):
    """Whatever the call, the table has a row whose needs are met."""
    environment(CYDIST_DETERMINISTIC=deterministic)
    for call in CALLS:
        name = chosen(collective, **call)
        needs = tuning_table.NEEDS[collective, name]
        missing = [
            need
            for need, met in (
                (tuning_table.WINDOWS, call["windows"]),
                (tuning_table.EVEN_BLOCKS, call["even"]),
                (tuning_table.COMMUTATIVE, call["commutative"]),
                (tuning_table.POWER_OF_TWO, call["ranks"] & (call["ranks"] - 1) == 0),
            )
            if needs & need and not met
        ]
        assert missing == [], (call, name)
        if deterministic == "1" and collective in tuning_table.REDUCING:
            assert (collective, name) in tuning_table.ONE_ROUNDING, call


def test_every_row_names_an_algorithm_that_exists():
    """The table of choices and the table of algorithms agree."""
    rules = (*tuning_table.TABLE, *tuning_table.DETERMINISTIC_TABLE)
    assert [rule for rule in rules if (rule.collective, rule.name) not in tuning_table.NEEDS] == []


# The numbers of algorithms that ranks send each other, by name and collective. A new row is added
# here; a change of another one would let two versions take different algorithms for the same.
NUMBERS = {
    "bruck": {"all_gather": 0, "all_to_all": 1, "reduce_scatter": 79},
    "direct": {
        "gather": 2, "scatter": 3, "broadcast": 4, "all_gather": 5, "all_to_all": 6,
        "all_reduce": 7, "reduce": 8, "reduce_scatter": 9, "scan": 10, "exscan": 11,
    },
    "adaptive": {
        "broadcast": 12, "all_gather": 13, "all_to_all": 14, "all_reduce": 15, "reduce": 16,
        "reduce_scatter": 17, "scan": 18, "exscan": 19,
    },
    "dissemination": {"barrier": 20, "scan": 21, "exscan": 22},
    "flat": {
        "broadcast": 23, "all_gather": 24, "gather": 25, "scatter": 26, "all_to_all": 27,
        "barrier": 28, "all_reduce": 29, "reduce": 30, "reduce_scatter": 31, "scan": 32,
        "exscan": 33,
    },
    "doubling": {"all_reduce": 34},
    "halving_doubling": {"all_reduce": 35},
    "linear": {"gather": 36, "scatter": 37},
    "native": {
        "broadcast": 38, "all_reduce": 39, "reduce": 40, "barrier": 41, "all_gather": 42,
        "reduce_scatter": 43, "all_to_all": 44,
    },
    "ordered": {"all_reduce": 45, "reduce": 47, "reduce_scatter": 48, "scan": 49, "exscan": 50},
    "ordered_scatter": {"all_reduce": 46},
    "pairwise": {"all_to_all": 51, "reduce_scatter": 52},
    "ring": {"all_reduce": 53, "reduce_scatter": 54, "all_gather": 55, "broadcast": 56},
    "staged": {"all_reduce": 57},
    "tree": {"broadcast": 58, "reduce": 59},
    "leaders": {
        "broadcast": 60, "all_reduce": 61, "reduce": 62, "all_gather": 63, "reduce_scatter": 64,
        "barrier": 65, "gather": 71, "scatter": 72, "all_to_all": 73, "scan": 75, "exscan": 76,
    },
    "lanes": {
        "broadcast": 66, "all_reduce": 67, "reduce": 68, "all_gather": 69, "reduce_scatter": 70,
        "all_to_all": 74, "scan": 77, "exscan": 78,
    },
    "chain": {"scan": 80, "exscan": 81},
}  # fmt: skip


def test_numbers_of_algorithms_are_unique():
    """Each row of the table has a number of its own, and each pair of name and collective one."""
    rows = algorithms()
    assert len({number for number, *_ in rows}) == len(rows)
    assert len({(name, code) for _, name, code, *_ in rows}) == len(rows)


def test_numbers_of_algorithms_never_change():
    """Fingerprints carry the number of the algorithm, so it is part of the wire format."""
    found = {}
    for number, name, code, *_ in algorithms():
        found.setdefault(name, {})[tuning_table.COLLECTIVES[code]] = number
    assert found == NUMBERS


@pytest.mark.parametrize("deterministic", ["0", "1"], ids=["free", "deterministic"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_fallback_always_runs(environment, collective, deterministic):
    """What takes a call that its algorithm finds it cannot run needs nothing that is found in the
    call, nor windows where that one needs none."""
    environment(CYDIST_DETERMINISTIC=deterministic)
    for call in CALLS:
        given = {key: value for key, value in call.items() if key != "windows"}
        for (each, name), needs in tuning_table.NEEDS.items():
            if each != collective:
                continue
            fallback = tuning_table.fallback(collective, name, **given)
            assert (fallback != "") == (needs & tuning_table.FOUND_IN_CALL != 0), name
            if fallback:
                more = tuning_table.NEEDS[collective, fallback] & ~needs
                found_in_call = tuning_table.NEEDS[collective, fallback] & needs
                assert not found_in_call & tuning_table.FOUND_IN_CALL, (name, fallback)
                allowed = tuning_table.EVEN_BLOCKS * call["even"]
                allowed |= tuning_table.COMMUTATIVE * call["commutative"]
                assert more & ~allowed == 0, (name, fallback)
                if deterministic == "1" and collective in tuning_table.REDUCING:
                    assert (collective, fallback) in tuning_table.ONE_ROUNDING, (name, fallback)


@pytest.mark.parametrize(
    ("collective", "name", "nbytes", "ranks", "expected"),
    [
        ("all_reduce", "direct", 1 << 20, 3, "staged"),
        ("all_reduce", "adaptive", 1 << 20, 2, "flat"),
        ("all_reduce", "adaptive", 1 << 20, 3, "staged"),
        ("all_reduce", "direct", 8, 2, "flat"),
        ("scan", "adaptive", 1 << 20, 2, "flat"),
        ("gather", "direct", 0, 2, "flat"),
        ("all_reduce", "native", 8, 3, "doubling"),
        ("all_reduce", "native", 1 << 19, 3, "ring"),
        ("all_gather", "native", 1 << 25, 3, "ring"),
        ("barrier", "native", 0, 3, "dissemination"),
        ("all_reduce", "ring", 1 << 20, 3, ""),
    ],
)
def test_the_table_has_the_fallback(environment, collective, name, nbytes, ranks, expected):
    """A call that its algorithm cannot run takes the first row that always runs."""
    found = tuning_table.fallback(collective, name, nbytes, ranks, even=True, commutative=True)
    assert found == expected


def test_limits_are_powers_of_two():
    """Calls are cached by size class, so a limit between two powers of two would lie."""
    limits = {limit for rule in tuning_table.TABLE for limit in (rule.most_bytes, rule.above_bytes)}
    limits -= {None, 0}
    assert {limit for limit in limits if limit & (limit - 1)} == set()


@pytest.mark.parametrize(
    ("nbytes", "ranks", "expected"),
    [
        (8, 2, "doubling"),
        (32768, 3, "doubling"),
        (32769, 3, "ring"),
        (1 << 30, 8, "ring"),
        (1 << 30, 4, "halving_doubling"),
    ],
)
def test_size_decides_on_messages(environment, nbytes, ranks, expected):
    """Short arrays take few steps, long ones move few bytes."""
    assert chosen("all_reduce", nbytes, ranks) == expected


@pytest.mark.parametrize(
    ("collective", "nbytes", "ranks", "expected"),
    [
        ("all_reduce", 4096, 2, "doubling"),
        ("all_reduce", 4097, 2, "doubling"),
        ("all_reduce", 8, 3, "native"),
        ("all_reduce", 4097, 3, "doubling"),
        ("all_reduce", 32769, 3, "ring"),
        ("all_reduce", 32769, 4, "halving_doubling"),
        ("reduce_scatter", 4096, 3, "native"),
        ("reduce_scatter", 4097, 3, "pairwise"),
        ("broadcast", 8, 2, "native"),
        ("broadcast", 65536, 2, "native"),
        ("broadcast", 4096, 3, "native"),
        ("broadcast", 4097, 3, "tree"),
        ("broadcast", 65537, 4, "native"),
        ("all_gather", 4096, 3, "native"),
        ("all_gather", 4097, 3, "bruck"),
        ("all_gather", 65537, 3, "native"),
        ("all_to_all", 65536, 2, "native"),
        ("all_to_all", 4096, 4, "native"),
        ("all_to_all", 4097, 4, "pairwise"),
        ("all_to_all", 1 << 30, 4, "pairwise"),
        ("barrier", 0, 2, "dissemination"),
        ("barrier", 0, 3, "native"),
        ("reduce", 4096, 2, "native"),
        ("reduce", 4097, 2, "tree"),
        ("scan", 1 << 20, 3, "dissemination"),
    ],
)
def test_a_library_serves_what_it_does_faster(environment, collective, nbytes, ranks, expected):
    """Two ranks exchange one message for a short call, and a library's call takes another. Longer
    reductions are ours under Open MPI, and on more ranks what moves data, where agreeing first
    would take longer."""
    assert chosen(collective, nbytes, ranks, library="Open MPI") == expected


@pytest.mark.parametrize(
    ("collective", "nbytes", "ranks", "expected"),
    [
        ("all_reduce", 16384, 3, "doubling"),
        ("all_reduce", 16385, 3, "native"),
        ("all_reduce", 8, 2, "doubling"),
        ("all_to_all", 8, 8, "pairwise"),
        ("all_to_all", 8, 9, "native"),
        ("all_reduce", 4097, 2, "native"),
        ("reduce", 8192, 3, "native"),
        ("reduce", 8193, 3, "tree"),
        ("barrier", 0, 4, "dissemination"),
        ("broadcast", 8, 4, "native"),
        ("exscan", 1 << 20, 3, "dissemination"),
    ],
)
def test_a_library_can_have_rows_of_its_own(environment, collective, nbytes, ranks, expected):
    """MPICH leaves short calls of a few ranks to ours; where a root hears nobody it does not."""
    assert chosen(collective, nbytes, ranks, library="MPICH") == expected


@pytest.mark.parametrize("library", ["Open MPI", "MPICH"])
@pytest.mark.parametrize(
    ("collective", "nbytes", "ranks", "expected"),
    [
        ("all_reduce", 8, 3, "doubling"),
        ("all_reduce", 32768, 64, "doubling"),
        ("all_reduce", 1 << 19, 2, "halving_doubling"),
        ("reduce_scatter", 8, 2, "pairwise"),
        ("reduce_scatter", 4096, 9, "bruck"),
        ("broadcast", 8, 2, "tree"),
        ("broadcast", 32768, 8, "tree"),
        ("broadcast", 32769, 2, "native"),
        ("all_gather", 8, 2, "native"),
        ("all_gather", 8, 3, "bruck"),
        ("all_gather", 65537, 3, "native"),
        ("all_to_all", 8, 2, "native"),
        ("all_to_all", 65536, 4, "pairwise"),
        ("barrier", 0, 3, "dissemination"),
        ("reduce", 8, 2, "tree"),
    ],
)
def test_between_hosts_short_calls_are_ours(
    environment, collective, nbytes, ranks, expected, library
):
    """A library's call takes a message more. Two ranks that move data have it in one."""
    placed = {"library": library, "placement": f"{ranks}x1"}
    assert chosen(collective, nbytes, ranks, **placed) == expected


def test_a_library_may_serve_unless_a_setting_demands_ours(environment):
    """Whatever the size: for arrays that only the library reaches."""
    assert all(tuning_table.leaves_to_library(each, 2) for each in tuning_table.IN_LIBRARIES)
    assert not tuning_table.leaves_to_library("scan", 2)
    environment(CYDIST_ALGORITHM="broadcast:tree,barrier:native,all_gather:flat")
    asked = ("broadcast", "barrier", "all_gather", "all_reduce")
    assert [tuning_table.leaves_to_library(each, 2) for each in asked] == [False, True, True, True]
    environment(CYDIST_ALGORITHM="", CYDIST_DETERMINISTIC="1")
    assert [tuning_table.leaves_to_library(each, 2) for each in asked] == [True, True, True, False]


@pytest.mark.parametrize("collective", ["scan", "exscan"])
@pytest.mark.parametrize(
    ("nbytes", "ranks", "expected"),
    [
        (1 << 30, 2, "dissemination"),
        (16384, 3, "dissemination"),
        (16385, 4, "chain"),
        (65536, 5, "dissemination"),
        (65537, 8, "chain"),
        (1 << 21, 9, "dissemination"),
        (1 << 22, 9, "chain"),
        (1 << 22, 100, "dissemination"),
    ],
)
def test_long_scans_go_along_a_chain(environment, collective, nbytes, ranks, expected):
    """The more ranks there are, the longer an array has to be for so many steps."""
    assert chosen(collective, nbytes, ranks) == expected


def test_the_setting_wins(environment):
    """CYDIST_ALGORITHM names the algorithm of each collective it lists, and of no other."""
    environment(CYDIST_ALGORITHM="all_reduce:ring, broadcast:ring")
    names = [chosen(name, 8, 4) for name in ("all_reduce", "broadcast", "all_gather")]
    assert names == ["ring", "ring", "bruck"]


def test_a_setting_may_give_a_former_name(environment):
    """What algorithms were called before is understood, and chosen by today's name."""
    environment(CYDIST_ALGORITHM="all_reduce:either")
    assert chosen("all_reduce", 8, 4, windows=True) == "adaptive"


def test_a_setting_that_cannot_run_leaves_the_call_to_the_table(environment):
    """Without windows "flat" cannot run; ring cannot where the reduction does not commute."""
    environment(CYDIST_ALGORITHM="broadcast:flat,all_reduce:ring")
    names = (chosen("broadcast", 8, 4), chosen("all_reduce", 8, 4, commutative=False))
    assert names == ("tree", "doubling")


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("all_reduce:rings", "all_reduce has adaptive, direct, doubling, flat, halving_doubling"),
        ("allreduce:ring", "write collective:name"),
        ("ring", "write collective:name"),
    ],
)
def test_a_setting_that_names_nothing_raises(environment, setting, says):
    """A misspelt experiment must not pass for a result."""
    environment(CYDIST_ALGORITHM=setting)
    with pytest.raises(ValueError, match=says):
        chosen("all_reduce", 8, 4)


def test_settings_that_contradict_raise(environment):
    """A ring rounds at each step, so it is not deterministic in the sense of the setting."""
    environment(CYDIST_ALGORITHM="all_reduce:ring", CYDIST_DETERMINISTIC="1")
    with pytest.raises(ValueError, match="one rounding"):
        chosen("all_reduce", 8, 4)


@pytest.mark.parametrize("setting", ["0", "-1", "64k"])
def test_a_segment_is_a_positive_number_of_bytes(environment, setting):
    """Anything else raises, and says what was set."""
    environment(CYDIST_SEGMENT_BYTES=setting)
    with pytest.raises(ValueError, match=f"CYDIST_SEGMENT_BYTES='{setting}'"):
        tuning_table.segment_bytes()


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast"])
@pytest.mark.parametrize("ranks", [1 << k for k in range(4, 14)])
def test_many_ranks_make_a_ring_of_long_arrays_only(collective: str, ranks: int) -> None:
    """A ring has a step for each rank, so each message carries enough to be worth it."""
    chosen = {
        1 << k: tuning_table.choose(collective, 1 << k, ranks, False, even=True, commutative=True)
        for k in range(3, 34)
    }
    ring = [nbytes for nbytes, name in chosen.items() if name == "ring"]
    assert ring, "no array is long enough"
    assert min(ring) >= 64 * 1024 * ranks
    assert len(ring) == sum(nbytes >= min(ring) for nbytes in chosen)
