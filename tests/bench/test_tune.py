"""`python -m cydist.bench --tune`: what is decided from times, and that it ends in a file."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs_on_hosts import job_on
from network_hosts import network_of, require_hosts

from cydist.bench import fit
from cydist.bench.__main__ import main
from cydist.bench.cases import Case
from cydist.bench.fit import Size, better, decide, rules
from cydist.bench.measure import as_counted
from cydist.bench.tune import COLLECTIVES
from cydist.tuning import file as tuning_file
from cydist.tuning import table as tuning_table
from cydist.tuning.table import Rule

BYTES = [8 << 3 * power for power in range(8)]
PORT, LIMIT = 29884, 100.0
NAMES = ("doubling", "halving_doubling", "ring")


def sizes(shipped: Sequence[str], **medians: Sequence[float]) -> list[Size]:
    """One size for each element; ratios that every round agrees on."""
    return [
        Size(nbytes, name, [{each: [ratios[number]] * 5 for each, ratios in medians.items()}])
        for number, (nbytes, name) in enumerate(zip(BYTES, shipped, strict=False))
    ]


# ---- decisions ----


def test_a_crossover_is_found() -> None:
    """The new algorithm is taken from where it begins to be faster."""
    found = sizes(["ring"] * 4, ring=[1] * 4, doubling=[0.5, 0.7, 2, 4])
    assert decide(found) == ["doubling", "doubling", "ring", "ring"]


def test_a_shipped_crossover_moves() -> None:
    """Between two algorithms that are both shipped the crossover goes where it was measured."""
    found = sizes(
        ["doubling", "ring", "ring", "ring"], doubling=[1, 0.7, 0.8, 2], ring=[2, 1, 1, 1]
    )
    assert decide(found) == ["doubling", "doubling", "doubling", "ring"]


def test_rounds_that_disagree_gain_nothing() -> None:
    """A median that a few lucky rounds have made is noise."""
    ratios = {"ring": [1.0] * 5, "doubling": [0.3, 0.4, 0.5, 1.1, 1.3]}
    assert decide([Size(8, "ring", [ratios])]) == ["ring"]


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ({"ring": [1.0] * 5, "doubling": [0.8] * 5}, "doubling"),
        ({"ring": [1.0] * 5, "doubling": [0.97] * 5}, "ring"),
        ({"ring": [1.0] * 5, "doubling": [1.3] * 5}, "ring"),
        ({"ring": [1.0] * 5, "tree": [0.5] * 5}, "ring"),
    ],
    ids=["again", "equal", "the other way", "not measured again"],
)
def test_a_second_pass_must_find_it_too(second: dict[str, list[float]], expected: str) -> None:
    """What only one of two passes finds is noise, and what the second has not tried is no gain."""
    first = {"ring": [1.0] * 5, "doubling": [0.5] * 5}
    assert decide([Size(8, "ring", [first, second])]) == [expected]


def test_what_cannot_be_told_apart_is_equal() -> None:
    """Within the noise in every pass, or faster in one and slower in the other: equal."""
    ratios = {"ring": [1.0] * 5, "tree": [1.02] * 5, "doubling": [0.8] * 5, "ordered": [1.2] * 5}
    other = {"ring": [1.0] * 5, "doubling": [1.2] * 5}
    size = Size(8, "ring", [ratios, other])
    assert [name for name in ratios if size.equals(name)] == ["tree", "doubling"]


def test_one_size_in_the_middle_must_gain_more() -> None:
    """Two changes cost twice the noise; what gains more than that is taken."""
    low, high = [1, 0.92, 1], [1, 0.8, 1]
    worse = [1.5, 1, 1.5]
    for ratios, expected in ((low, ["ring"] * 3), (high, ["ring", "tree", "ring"])):
        medians = [a * b for a, b in zip(ratios, worse, strict=True)]
        medians[1] = ratios[1]
        assert decide(sizes(["ring"] * 3, ring=[1] * 3, tree=medians)) == expected


def test_nothing_measured() -> None:
    """No sizes, no decisions."""
    assert decide([]) == []
    assert better([], 4096) == 4096
    assert better([{65536: []}], 4096) == 4096


ratio_rows = st.lists(
    st.tuples(st.sampled_from(NAMES), *[st.floats(0.2, 5.0)] * len(NAMES)), min_size=1, max_size=8
)


def measured(rows: Sequence[tuple[Any, ...]]) -> list[Size]:
    """Sizes from (shipped, time of each of NAMES)."""
    return [
        Size(nbytes, shipped, [{
            name: [time / times[NAMES.index(shipped)]] * 5
            for name, time in zip(NAMES, times, strict=True)
        }])
        for nbytes, (shipped, *times) in zip(BYTES, rows, strict=False)
    ]  # fmt: skip


@given(ratio_rows)
def test_never_worse_than_shipped(rows: list[tuple[Any, ...]]) -> None:
    """The product of the ratios of what is decided is at most 1, up to the noise of each size."""
    found = measured(rows)
    names = decide(found)
    assert sum(size.cost(name) for size, name in zip(found, names, strict=True)) <= 1e-9


@given(ratio_rows)
def test_every_change_pays(rows: list[tuple[Any, ...]]) -> None:
    """What is gained over what is shipped is more than the noise for each change that is new."""
    found = measured(rows)
    names = decide(found)
    shipped = [size.in_force for size in found]
    changes = 0
    for number, (size, name) in enumerate(zip(found, names, strict=True)):
        before = (
            (names[number - 1], shipped[number - 1]) if number else (size.in_force, size.in_force)
        )
        new = name != before[0] and not (name == size.in_force and before[0] == before[1])
        changes += new
    gained = -sum(size.cost(name) for size, name in zip(found, names, strict=True))
    assert gained >= changes * fit.NOISE - 1e-9


@given(
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=8),
    st.lists(st.floats(-0.99, 0.99), min_size=24, max_size=24),
)
def test_noise_changes_nothing(shipped: list[str], wobble: list[float]) -> None:
    """Where all are equally fast within the noise, everything stays as shipped."""
    found = [
        Size(nbytes, name, [{
            each: [1.0 if each == name
                   else math.exp(fit.NOISE * wobble[3 * number + place])] * 5
            for place, each in enumerate(NAMES)
        }])
        for number, (nbytes, name) in enumerate(zip(BYTES, shipped, strict=False))
    ]  # fmt: skip
    assert decide(found) == shipped


@given(
    st.integers(1, 7), st.lists(st.floats(0.98, 1.02), min_size=8, max_size=8),
    st.sampled_from(["doubling", "ring"]),
)  # fmt: skip
def test_one_clear_crossover_gives_two_rules(
    crossover: int, wobble: list[float], shipped: str
) -> None:
    """One algorithm is faster below, another above: whatever is shipped, one crossover is found,
    and choosing by the rules gives what was decided."""
    times = [
        {"doubling": 1.5**number * each, "ring": 1.5 ** (crossover - 0.5)}
        for number, each in enumerate(wobble)
    ]
    found = [
        Size(nbytes, shipped, [{name: [time / each[shipped]] * 5 for name, time in each.items()}])
        for nbytes, each in zip(BYTES, times, strict=True)
    ]
    names = decide(found)
    assert names == ["doubling"] * crossover + ["ring"] * (8 - crossover)
    rows = rules("all_reduce", found, names)
    assert [row.name for row in rows] == ["doubling", "ring"]
    for size, name in zip(found, names, strict=True):
        assert next(row.name for row in rows if row.fits(size.size_class, 2)) == name


def test_rules_end_halfway() -> None:
    """Between the sizes that were measured the crossover lies in the middle, as sizes double."""
    found = [Size(nbytes, "ring", [{"ring": [1.0]}]) for nbytes in (1024, 16384)]
    expected = (Rule("all_reduce", "doubling", 4096), Rule("all_reduce", "ring"))
    assert rules("all_reduce", found, ["doubling", "ring"]) == expected


@pytest.mark.parametrize(
    ("passes", "expected"),
    [
        ([[0.7, 0.8], [0.8, 0.9]], 65536),
        ([[0.97, 0.96], [0.8, 0.9]], 4096),
        ([[0.7, 0.8], [0.97, 1.0]], 4096),
        ([[1.5, 1.5], [0.7, 0.7]], 4096),
    ],
    ids=["gains", "not at first", "not again", "loses"],
)
def test_segments(passes: list[list[float]], expected: int) -> None:
    """Another segment must gain more than the noise, in both passes."""
    found = [{65536: ratios, 4096: [1.0, 1.0]} for ratios in passes]
    assert better(found, 4096) == expected


def test_calls_of_unknown_sizes_are_one() -> None:
    """Of a gather table.py does not know the size: one decision, by the mean of all sizes."""
    wanted = [Case("gather", 2, "float32", 8), Case("gather", 200, "float32", 800)]
    passes = [[{"flat": [1.0, 1.0], "direct": [2.0, 4.0]}, {"flat": [1.0], "direct": [0.5]}]]
    assert as_counted("gather", wanted, ["flat", "flat"], passes) == [
        Size(0, "flat", [{"flat": [1.0], "direct": [1.0]}])
    ]


# ---- the table ----


def hit(constant: bool) -> set[Rule]:
    """The rows that decide for the calls that are measured, on up to 9 ranks, and where more than
    one algorithm could run; or for whom the engine would ask besides."""
    rows = set()
    for op in COLLECTIVES:
        for ranks, windows, hosts in itertools.product(range(2, 10), (False, True), (False, True)):
            if hosts and (windows or ranks == 2):
                continue
            known = op not in tuning_table.UNSIZED
            able = tuning_table.candidates(
                op, ranks, windows, even=known, hosts=hosts, consecutive=hosts
            )
            for size_class in range(31 if known else 1):
                fitting = (
                    rule
                    for rule in tuning_table.TABLE
                    if rule.collective == op and rule.name in able and rule.fits(size_class, ranks)
                )
                rows.add(next(fitting))
    return {row for row in rows if bool(row.constant) == constant}


def test_every_row_is_tuned_or_says_why_not() -> None:
    """A row of the table decides for a call that --tune measures, or names the reason for which it
    is a constant; and no constant is measured."""
    unsaid = [row for row in tuning_table.TABLE if not row.constant]
    assert [row for row in unsaid if row not in hit(constant=False)] == []
    assert hit(constant=True) == set()
    assert [row for row in tuning_table.DETERMINISTIC_TABLE if not row.constant] == []


# ---- the program ----


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every algorithm that can run is timed; what is found is printed, saved, and can be used."""
    monkeypatch.setattr("cydist.bench.runner.ROUND_NS", 1)
    output, figures = tmp_path / "tuning.json", tmp_path / "figures.json"
    code = main([
        "--tune", "--ops", "all_reduce,barrier,segment", "--sizes", "8,1Mi", "--rounds", "3",
        "--transport", "tcp", "--ranks", "2", "--output", str(output), "--json", str(figures),
    ])  # fmt: skip
    assert code == 0
    (entry,) = tuning_file.parse(tuning_file.read(output))
    assert (entry.ranks, entry.windows) == (2, False)
    assert "--tune" in entry.about["command"]
    printed = capsys.readouterr().out
    (group,) = json.loads(figures.read_text())["groups"]
    assert [case["bytes"] for case in group["cells"]] == [8, 1 << 20]
    for case in group["cells"]:
        names = tuning_table.candidates("all_reduce", 2, False)
        assert list(case["passes"][0]) == names
        assert case["chosen"] in names
        assert [name for name in names if name not in printed] == []
    try:
        tuning_file.use_measured([entry])
        found = [tuning_table.choose("all_reduce", case["bytes"], 2, False, even=True,
                                     commutative=True) for case in group["cells"]]  # fmt: skip
    finally:
        tuning_file.use_measured([])
    assert found == [case["chosen"] for case in group["cells"]]
    assert "barrier: only one algorithm can run" in printed
    assert len(group["segments"][0]["65536"]) == len(set(COLLECTIVES) - tuning_table.UNCUT)
    assert tuning_table.choose("all_reduce", 8, 2, False, even=True, commutative=True) == "doubling"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "2,1"], "--ranks 1"),
        (["--ops", "sort"], "no 'sort'"),
        (["--sizes", "0"], "is not a size"),
        (["--minutes", "0"], "--minutes 0"),
        (["--rounds", "2"], "--rounds 2: at least 3"),
        ([], "CYDIST_TUNING=off"),
        (["--output", "/dev/null/x.json"], "/dev/null/x.json cannot be written"),
        (["--output", "/"], "/ cannot be written: it is a folder"),
        (["--job", "--ranks", "2"], "--ranks is for one host"),
        (["--job", "--transport", "tcp"], "--transport is for one host"),
    ],
    ids=["ranks", "ops", "sizes", "minutes", "rounds", "nowhere to save", "no folder", "a folder",
         "ranks of a job", "transport of a job"],
)  # fmt: skip
def test_wrong_options(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong option ends the program before anything is started."""
    with pytest.raises(SystemExit):
        main([*arguments, "--tune"])
    assert said in capsys.readouterr().err


def test_forced_is_not_tuned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a setting forces an algorithm there is nothing to find out."""
    monkeypatch.setenv("CYDIST_ALGORITHM", "all_reduce:ring")
    with pytest.raises(SystemExit):
        main(["--tune"])
    assert "CYDIST_ALGORITHM is set" in capsys.readouterr().err


def test_help_says_how_many_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    """The help names the number of rounds that this program has by default, not the others'."""
    with pytest.raises(SystemExit):
        main(["--tune", "--help"])
    assert "number of rounds (4)" in capsys.readouterr().out


class Answering:
    """Two ranks that are not there: every algorithm takes as long as `seconds` says."""

    name = "first"
    about: ClassVar[dict[str, str]] = {"transport": "none"}

    def __init__(self, seconds: Callable[[str, int], float], *, windows: bool = False) -> None:
        self.seconds, self.windows, self.algorithm, self.nbytes = seconds, windows, "", 0
        self.segment = ""  # as forced

    def command(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        if command["do"] == "configure":
            self.algorithm = command["settings"].get("ALGORITHM", "").partition(":")[2]
            self.segment = command["settings"].get("SEGMENT_BYTES", "")
            return [{"windows": self.windows}] * 2
        if command["do"] == "crossovers":
            tuning_file.use_measured(tuning_file.parse(command["text"]))
            return [{}] * 2
        if command["do"] == "case":
            self.nbytes = 4 * command["count"]
            return [{"wrong": 0, "algorithm": self.algorithm}] * 2
        ns = int(1e9 * self.seconds(self.algorithm, self.nbytes))
        each = {"each_ns": [ns] * command["iterations"]}
        return [{"wrong": 0, "ns": ns * command["iterations"], **each}] * 2

    def close(self) -> None:
        pass


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """tuned(seconds, *arguments): run it on ranks that take `seconds(algorithm, bytes)`."""

    def run(seconds: Callable[[str, int], float], *arguments: str, windows: bool = False) -> None:
        ranks = Answering(seconds, windows=windows)
        monkeypatch.setattr(
            "cydist.bench.tune.started_workers", lambda *_: nullcontext([ranks] * 2)
        )
        output = ("--output", str(tmp_path / "tuning.json"))
        assert main(["--tune", "--ranks", "2", *output, *arguments]) == 0

    yield run
    tuning_file.use_measured([])


def fast(name: str) -> Callable[[str, int], float]:
    """An algorithm twice as fast as the others."""
    return lambda algorithm, nbytes: 1e-4 if algorithm == name else 2e-4


def test_ops_are_tuned_in_pieces(tuned: Callable[..., None], tmp_path: Path) -> None:
    """A run with --ops adds to what the file has, and takes nothing away."""
    tuned(fast("ring"), "--ops", "broadcast")
    tuned(fast("ring"), "--ops", "all_gather")
    (entry,) = tuning_file.parse(tuning_file.read(tmp_path / "tuning.json"))
    assert entry.rules == {
        "broadcast": (Rule("broadcast", "ring"),), "all_gather": (Rule("all_gather", "ring"),),
    }  # fmt: skip


def test_a_second_run_changes_nothing(
    tuned: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a run has found is in force in the next, which leaves what is as fast."""
    tuned(fast("ring"), "--ops", "broadcast")
    first = tuning_file.read(tmp_path / "tuning.json")
    capsys.readouterr()
    tuned(lambda algorithm, nbytes: 1e-4, "--ops", "broadcast")
    printed = capsys.readouterr().out
    assert "stays as it is" in printed
    assert "equal: tree" in printed
    rules = [[each.rules for each in tuning_file.parse(text)]
             for text in (first, tuning_file.read(tmp_path / "tuning.json"))]  # fmt: skip
    assert rules[0] == rules[1]


def test_a_segment_is_found_for_hosts(
    tuned: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A job on several hosts saves the fastest segment with its placement, and a second run finds
    that in force."""
    ranks = Answering(lambda algorithm, nbytes: 1e-4 if ranks.segment == "65536" else 2e-4)
    monkeypatch.setattr("cydist.bench.tune.Cydist", lambda *_: None)
    monkeypatch.setattr(
        "cydist.bench.tune.driven", lambda *_: nullcontext(([ranks], ["a", "a", "b", "b"]))
    )
    output = tmp_path / "tuning.json"
    command = ["--tune", "--job", "--ops", "segment", "--sizes", "1Mi", "--output", str(output)]
    assert main(command) == 0
    (entry,) = tuning_file.parse(tuning_file.read(output))
    assert (entry.key(), entry.segment_bytes) == ((4, False, "2x2"), 65536)
    capsys.readouterr()
    assert main(command) == 0
    assert "segment: time by that with 64 KiB" in capsys.readouterr().out


def test_what_is_found_out_as_a_job_runs_stays(
    tuned: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the algorithm in force chooses as the job runs, those that it chooses between are no
    rivals: which is the faster one in this minute is no crossover."""
    tuned(fast("direct"), "--ops", "broadcast", "--sizes", "1Mi", windows=True)
    assert "stays as it is" in capsys.readouterr().out
    tuned(fast("ring"), "--ops", "broadcast", "--sizes", "1Mi", windows=True)
    (entry,) = tuning_file.parse(tuning_file.read(tmp_path / "tuning.json"))
    assert entry.rules == {"broadcast": (Rule("broadcast", "ring"),)}


@pytest.fixture
def hosts_can_be_made() -> None:
    """Namespaces serve as hosts."""
    require_hosts()


JOB = ["-m", "cydist.bench", "--tune", "--job", "--rounds", "3"]
# The same in short rounds, with two segments in broadcasts alone: all take minutes on busy cores.
SHORT_JOB = [
    "-c", "import sys; from cydist.bench import __main__, measure, runner, tune; "
          "runner.ROUND_NS, measure.SEGMENTS, tune.COLLECTIVES = 1, (65536,), ('broadcast',); "
          "sys.exit(__main__.main(sys.argv[1:]))", *JOB[2:],
]  # fmt: skip
CHOSEN = """
import sys
import numpy as np
import cydist as dist
from cydist.tuning import table as tuning

dist.init_process_group("tcp", timeout=50)
group = dist.group.WORLD
names = [None] * 4
dist.all_gather_object(names, tuning.choose_for_equal_blocks(
    "all_reduce", 8, 4, group.windows, hosts=True, consecutive=True, placement=group.placement))
array = np.ones(1, np.float32)
dist.all_reduce(array)
if dist.get_rank() == 0:
    print(*names, array[0], group.chosen()["algorithms"], sep="; ", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("hosts_can_be_made")
def test_a_job_of_two_hosts_is_tuned(tmp_path: Path) -> None:
    """A job of several hosts saves its measurements with the placement, in the order of times, and
    among the algorithms are those for hosts. It compares segments, too."""
    output, figures = tmp_path / "tuning.json", tmp_path / "figures.json"
    command = [*SHORT_JOB, "--ops", "all_reduce,segment", "--sizes", "8,1Mi",
               "--output", output, "--json", figures]  # fmt: skip
    with (
        network_of(2, tmp_path / "hosts") as (_, hosts),
        job_on(hosts, [0, 0, 1, 1], command, tmp_path, PORT) as ranks,
    ):
        lines = list(ranks[0].lines(LIMIT))
        assert [rank.ended(LIMIT) for rank in ranks] == [0] * 4
    assert f"saved to {output}" in lines
    (entry,) = tuning_file.parse(tuning_file.read(output))
    assert entry.key() == (4, False, "2x2")
    (group,) = json.loads(figures.read_text())["groups"]
    assert group["placement"] == "2x2"
    able = tuning_table.candidates("all_reduce", 4, False, hosts=True, consecutive=True)
    assert {"leaders", "lanes", "doubling", "ring"} <= set(able)
    assert [list(cell["passes"][0]) for cell in group["cells"]] == [able] * 2
    in_force = tuning_table.DEFAULT_SEGMENT_BYTES
    assert set(group["segments"][0]) == {"65536", str(in_force)}
    assert (entry.segment_bytes or in_force) == group["segment_bytes"]
    tuning_file.use_measured([entry])
    try:
        found = [
            tuning_table.choose_for_equal_blocks(
                "all_reduce", cell["bytes"], 4, False, hosts=True, consecutive=True,
                placement="2x2",
            )
            for cell in group["cells"]
        ]  # fmt: skip
    finally:
        tuning_file.use_measured([])
    assert found == [cell["chosen"] for cell in group["cells"]]


@pytest.mark.timeout(200)
@pytest.mark.usefixtures("hosts_can_be_made")
def test_all_hosts_use_what_rank_0_knows(tmp_path: Path) -> None:
    """In a later job of that placement all ranks take the rows of rank 0's file, on hosts without
    one too, and the log says where they are from."""
    file = tmp_path / "tuning.json"
    rules = {"all_reduce": (Rule("all_reduce", "ring"),)}
    tuning_file.save([tuning_file.Measured(4, False, rules, placement="2x2")], file)
    program = tmp_path / "program.py"
    program.write_text(CHOSEN)
    only_rank_0 = ["-c", "import os, runpy\n"
                   f"os.environ['CYDIST_TUNING'] = {str(file)!r} if os.environ['RANK'] == '0' "
                   f"else ''\nrunpy.run_path({str(program)!r})"]  # fmt: skip
    with (
        network_of(2, tmp_path / "hosts") as (_, hosts),
        job_on(hosts, [0, 0, 1, 1], only_rank_0, tmp_path, PORT + 1) as ranks,
    ):
        (line,) = ranks[0].lines(LIMIT)
        assert [rank.ended(LIMIT) for rank in ranks] == [0] * 4
    assert line == "ring; ring; ring; ring; 4.0; measured on hosts with 2x2 ranks"


CUT = """
import json, os
import numpy as np
import cydist as dist

if os.environ["RANK"] != "3":
    del os.environ["CYDIST_SEGMENT_BYTES"]
dist.init_process_group("tcp", timeout=50)
array = np.ones(1 << 17)
try:
    dist.all_reduce(array)
    end = [*map(float, set(array))]
except dist.MismatchError:
    end = "MismatchError"
print(json.dumps(end), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.timeout(200)
@pytest.mark.usefixtures("hosts_can_be_made")
@pytest.mark.parametrize("forced", [4096, 8192], ids=["as-saved", "another"])
@pytest.mark.parametrize("algorithm", ["lanes", "ring"])
def test_groups_on_hosts_cut_by_the_saved_segment(
    tmp_path: Path, algorithm: str, forced: int
) -> None:
    """A rank whose environment says the segment of rank 0's file agrees with the others, in what
    runs on parts of the group, too. With another segment the call is a mismatch."""
    file = tmp_path / "tuning.json"
    tuning_file.save([tuning_file.Measured(4, False, {}, 4096, placement="2x2")], file)
    environ = {"CYDIST_TUNING": str(file), "CYDIST_SEGMENT_BYTES": str(forced),
               "CYDIST_ALGORITHM": f"all_reduce:{algorithm}"}  # fmt: skip
    with (
        network_of(2, tmp_path / "hosts") as (_, hosts),
        job_on(hosts, [0, 0, 1, 1], ["-c", CUT], tmp_path, PORT + 2, environ) as ranks,
    ):
        ends = [json.loads(rank.line(LIMIT)) for rank in ranks]
    assert ends == [[4.0] if forced == 4096 else "MismatchError"] * 4


def test_a_wrong_option_ends_all_ranks_of_a_job(tmp_path: Path) -> None:
    """A fault that only rank 0 finds ends the other ranks, too, without an error of theirs."""
    done = subprocess.run(
        [sys.executable, "-m", "cydist.run", "--nproc-per-node", "2", *JOB, "--output", tmp_path],
        capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "it is a folder" in done.stderr
    assert "[1]" not in done.stderr
    assert "Traceback" not in done.stderr


def test_no_time_left(tuned: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    """What there was no time for is named, with the options to go on."""
    tuned(fast("ring"), "--ops", "broadcast,segment", "--minutes", "1e-9")
    assert "go on with --ranks 2 --ops broadcast,segment" in capsys.readouterr().out


def test_figures_are_saved_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the crossovers cannot be written at the end, the figures are there all the same."""
    ranks = Answering(fast("ring"))
    monkeypatch.setattr("cydist.bench.tune.started_workers", lambda *_: nullcontext([ranks, ranks]))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tuning_file, "save", full)
    figures = tmp_path / "figures.json"
    with pytest.raises(SystemExit):
        main([
            "--tune", "--ranks", "2", "--ops", "broadcast",
            "--json", str(figures), "--output", str(tmp_path / "tuning.json"),
        ])  # fmt: skip
    assert "No space left" in capsys.readouterr().err
    assert [group["ranks"] for group in json.loads(figures.read_text())["groups"]] == [2]
