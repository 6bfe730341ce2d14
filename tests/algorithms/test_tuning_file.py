"""Crossovers that were measured on a machine: where they are kept, who reads them, what counts."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cydist
from cydist.testing import run_threads
from cydist.tuning import file as tuning_file
from cydist.tuning import table as tuning_table
from cydist.tuning.file import Measured
from cydist.tuning.table import NEEDS, Rule

ROOT = Path(__file__).resolve().parents[2]
RING = Measured(2, False, {"all_reduce": (Rule("all_reduce", "ring"),)})


@pytest.fixture(autouse=True)
def as_shipped() -> Iterator[None]:
    """Afterwards nothing that was measured is in use."""
    yield
    tuning_file.use_measured([])
    tuning_table.reload()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where CYDIST_TUNING points; nothing is there yet."""
    path = tmp_path / "tuning.json"
    monkeypatch.setenv("CYDIST_TUNING", str(path))
    return path


def chosen(collective: str, nbytes: int, ranks: int = 2, windows: bool = False) -> str:
    return tuning_table.choose(collective, nbytes, ranks, windows, even=True, commutative=True)


# ---- what counts ----


def test_measured_rules_come_before_the_table() -> None:
    """Up to its limit a measured rule counts, then the next, then the table."""
    rules = (Rule("all_reduce", "ordered", 1024), Rule("all_reduce", "ring", 4096))
    shipped = chosen("all_reduce", 8192)
    tuning_file.use_measured([Measured(2, False, {"all_reduce": rules})])
    assert [chosen("all_reduce", n) for n in (1024, 1025, 8192)] == ["ordered", "ring", shipped]


@pytest.mark.parametrize(
    ("collective", "ranks", "windows"),
    [("all_reduce", 3, False), ("all_reduce", 2, True), ("broadcast", 2, False)],
    ids=["ranks", "windows", "collective"],
)
def test_what_was_not_measured_stays(collective: str, ranks: int, windows: bool) -> None:
    """Rules hold for groups of that size, with or without windows, and for that collective."""
    shipped = chosen(collective, 8, ranks, windows)
    tuning_file.use_measured([RING])
    assert chosen("all_reduce", 8) == "ring"
    assert chosen(collective, 8, ranks, windows) == shipped


def test_a_file_may_give_a_former_name() -> None:
    """What algorithms were called before is understood in a file, and written by today's name."""
    rules = {"broadcast": (Rule("broadcast", "adaptive", 4096),)}
    text = tuning_file.encode([Measured(2, True, rules)])
    former = text.replace("adaptive", "either")
    assert former != text
    assert tuning_file.parse(former) == tuning_file.parse(text)
    assert tuning_file.encode(tuning_file.parse(former)) == text


def test_a_measured_rule_that_cannot_run_is_passed_over() -> None:
    """A reduction that does not commute does not get a ring."""
    tuning_file.use_measured([RING])
    name = tuning_table.choose("all_reduce", 8, 2, False, even=True, commutative=False)
    assert not NEEDS["all_reduce", name] & tuning_table.COMMUTATIVE


def test_forced_counts_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """CYDIST_ALGORITHM comes before what was measured."""
    monkeypatch.setenv("CYDIST_ALGORITHM", "all_reduce:doubling")
    tuning_file.use_measured([RING])
    assert chosen("all_reduce", 8) == "doubling"


def test_deterministic_counts_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """With CYDIST_DETERMINISTIC nothing that rounds in between is taken."""
    monkeypatch.setenv("CYDIST_DETERMINISTIC", "1")
    tuning_file.use_measured([RING])
    assert ("all_reduce", chosen("all_reduce", 8)) in tuning_table.ONE_ROUNDING


def test_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A measured segment holds for its groups; CYDIST_SEGMENT_BYTES comes before it."""
    tuning_file.use_measured([Measured(2, True, {}, 4096)])
    assert tuning_table.segment_bytes(2, True) == 4096
    assert tuning_table.segment_bytes(2, False) == tuning_table.DEFAULT_SEGMENT_BYTES
    monkeypatch.setenv("CYDIST_SEGMENT_BYTES", "99")
    tuning_table.reload()
    assert tuning_table.segment_bytes(2, True) == 99


def test_segments_of_hosts() -> None:
    """A segment that was measured on several hosts holds for groups with that placement, and none
    that was measured on one host does where ranks share hosts."""
    tuning_file.use_measured(
        [Measured(4, False, {}, 4096), Measured(4, False, {}, 8192, placement="2x2")]
    )
    shipped = tuning_table.DEFAULT_SEGMENT_BYTES
    for hosts, placement, expected in (
        (True, "2x2", 8192), (True, "3+1", shipped), (True, "", shipped), (False, "4x1", 4096),
        (False, "", 4096),
    ):  # fmt: skip
        found = tuning_table.segment_bytes(4, False, hosts=hosts, placement=placement)
        assert found == expected, (hosts, placement)


def test_segments_of_parts() -> None:
    """A part of a group on several hosts has the group's measured segment, else its own."""
    tuning_file.use_measured(
        [Measured(2, False, {}, 4096), Measured(4, False, {}, 1024),
         Measured(4, False, {}, 8192, placement="2x2")]
    )  # fmt: skip
    for placement, expected in ("2x2", 8192), ("3+1", 4096), ("", 4096):
        found = tuning_table.part_segment_bytes((4, False, placement), "", 2, False)
        assert found == expected, placement


def test_a_library_has_no_measured_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements over sockets say nothing of a library's messages. Between hosts its segments are
    short, unless the user sets them."""
    tuning_file.use_measured([Measured(2, False, {}, 4096)])
    shipped = tuning_table.DEFAULT_SEGMENT_BYTES
    assert tuning_table.segment_bytes(2, False, library="MPICH") == shipped
    between = partial(tuning_table.part_segment_bytes, (4, False, ""), "MPICH", 2, False)
    assert between() == tuning_table.LIBRARY_SEGMENT_BYTES
    monkeypatch.setenv("CYDIST_SEGMENT_BYTES", "777")
    tuning_table.reload()
    assert between() == 777


# ---- the job ----

PROGRAM = """
import sys
import numpy as np
import cydist as dist
from cydist.tuning import table as tuning

dist.init_process_group("tcp", sys.argv[1], rank=int(sys.argv[2]), world_size=2, timeout=50)
dist.all_reduce(np.ones(1))
print(tuning.choose("all_reduce", 8, 2, False, even=True, commutative=True), end="")
dist.destroy_process_group()
"""


def printed_by(program: str, directory: Path, settings: list[str]) -> list[tuple[str, str]]:
    """What two ranks write on stdout and stderr, with CYDIST_TUNING as `settings` say."""
    inherited = {name: text for name, text in os.environ.items() if name[:7] != "CYDIST_"}
    common = {**inherited, "PYTHONPATH": str(ROOT), "CYDIST_TRANSPORT": "tcp",
              "XDG_STATE_HOME": str(directory)}  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, f"file://{directory}/meeting", f"{rank}"],
            env={**common, "CYDIST_TUNING": setting},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank, setting in enumerate(settings)
    ]  # fmt: skip
    try:
        return [process.communicate(timeout=80) for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.timeout(100)
@pytest.mark.parametrize("first", ["ring", "", "damaged"])
def test_rank_0_decides(tmp_path: Path, first: str) -> None:
    """Hosts with different files: all ranks choose by that of rank 0's, or as shipped if there
    is none or it cannot be read; no call is a mismatch."""
    shipped = chosen("all_reduce", 8)
    places = [tmp_path / "0.json", tmp_path / "1.json"]
    if first == "damaged":
        places[0].write_text("{")
    elif first:
        tuning_file.save([RING], places[0])
    tuning_file.save(
        [Measured(2, False, {"all_reduce": (Rule("all_reduce", "ordered"),)})], places[1]
    )
    settings = [str(places[0]) if first else "off", str(places[1])]
    ended = printed_by(PROGRAM, tmp_path, settings)
    assert [out for out, _ in ended] == [first if first == "ring" else shipped] * 2, ended
    warned = [str(places[0]) in err for _, err in ended]
    assert warned == [first == "damaged", False]


TORCH_PROGRAM = """
import sys
import torch
import torch.distributed as dist
import cydist.interop.torch
from cydist.tuning import table as tuning

dist.init_process_group("cydist", sys.argv[1], rank=int(sys.argv[2]), world_size=2)
dist.all_reduce(torch.ones(1))
print(tuning.choose("all_reduce", 8, 2, False, even=True, commutative=True), end="")
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.more
@pytest.mark.timeout(100)
def test_torchs_default_group(tmp_path: Path) -> None:
    """As torch's backend, the ranks of its default group choose by rank 0's file, too."""
    pytest.importorskip("torch")
    place = tmp_path / "0.json"
    tuning_file.save([RING], place)
    said = printed_by(TORCH_PROGRAM, tmp_path, [str(place), "off"])
    assert [out for out, _ in said] == ["ring"] * 2, said


def test_a_new_job_forgets(file: Path) -> None:
    """Rules hold for the jobs that begin while they are there."""
    tuning_file.save([RING], file)
    assert run_threads(lambda _: chosen("all_reduce", 8), 2, "inproc") == ["ring"] * 2
    file.unlink()
    with pytest.warns(RuntimeWarning, match="No such file"):
        names = run_threads(lambda _: chosen("all_reduce", 8), 2, "inproc")
    assert names == ["doubling"] * 2


# ---- the file ----


def test_saved_and_read(file: Path) -> None:
    """What is saved is read as it was."""
    rules = (Rule("broadcast", "tree", 1 << 19), Rule("broadcast", "ring"))
    written = [Measured(4, True, {"broadcast": rules}, 65536, {"date": "today"}), RING]
    tuning_file.save(written, file)
    assert tuning_file.parse(tuning_file.load()) == written


def test_a_folder_and_a_file_of_ones_own(tmp_path: Path) -> None:
    """Folders are made; only this user may open the file, and no draft is left."""
    path = tmp_path / "new" / "tuning.json"
    tuning_file.save([RING], path)
    tuning_file.save([RING, RING], path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == [path.name]


def test_a_failed_save_changes_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old file stays whole when the new one cannot be finished, and no draft is left."""
    tuning_file.save([RING], file)
    before = file.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        tuning_file.save([], file)
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]


def test_the_users_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CYDIST_TUNING it lies in the user's state, by the host's name; none is no warning."""
    monkeypatch.setenv("CYDIST_TUNING", "")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("socket.gethostname", lambda: "node/17")
    assert tuning_file.default_path() == tmp_path / "cydist" / "tuning-node-17.json"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuning_file.load() == ""


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user whom the system does not know, without HOME, has no file: jobs go on as shipped."""

    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for name in ("HOME", "XDG_STATE_HOME", "CYDIST_TUNING"):
        monkeypatch.delenv(name, raising=False)
    assert tuning_file.default_path() is None
    assert tuning_file.load() == ""


@pytest.mark.parametrize("named", [True, False], ids=["named", "default"])
def test_a_folder_that_may_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """A file that a user asked for is missed; the one that may be at the usual place is not."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("CYDIST_TUNING", str(tmp_path / "tuning.json") if named else "")

    def refused(path: Path, *_: object) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refused)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert tuning_file.load() == ""
    assert ["Permission denied" in str(each.message) for each in said] == [True] * named


@pytest.mark.parametrize("setting", ["off", "OFF"])
def test_off(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    """CYDIST_TUNING=off: no file is looked for."""
    monkeypatch.setenv("CYDIST_TUNING", setting)
    assert tuning_file.default_path() is None
    assert tuning_file.load() == ""


def document(form: int = tuning_file.FORMAT, **changes: Any) -> str:
    """A file with one entry, and with changes in it: `rules`, or anything of the entry's."""
    entry = {"ranks": 2, "windows": False, "rules": {"all_reduce": [{"name": "ring"}]}} | changes
    return json.dumps({"format": form, "cydist": cydist.__version__, "measured": [entry]})


def test_files_without_placements_are_read() -> None:
    """A file of format 1 counts as before, and is written in today's format."""
    (entry,) = tuning_file.parse(document(1))
    assert entry == RING
    assert tuning_file.parse(tuning_file.encode([entry])) == [RING]
    assert json.loads(tuning_file.encode([entry]))["format"] == 2


def test_a_placement_is_kept() -> None:
    """Rows and segments of several hosts are written with their placement, and read with it."""
    rules = {"all_reduce": (Rule("all_reduce", "lanes"),)}
    placed = Measured(4, False, rules, 65536, placement="3+1")
    assert tuning_file.parse(tuning_file.encode([placed])) == [placed]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "Expecting"),
        ("[" * 100_000, "nested|recursion|JSON"),
        ("[]", "not an object"),
        (json.dumps({"format": 1, "cydist": "0.0.0", "measured": []}), "of cydist '0.0.0'"),
        (json.dumps({"format": 9, "cydist": cydist.__version__}), "format 9"),
        (json.dumps({"format": 1, "cydist": cydist.__version__}), "measured is not a list"),
        (document(rules={"all_reduce": [{"name": "magic"}]}), "no algorithm all_reduce:magic"),
        (document(rules={"sort": [{"name": "ring"}]}), "no algorithm sort:ring"),
        (document(rules={"all_reduce": [{"name": "ring", "most_bytes": 3}]}), "power of two"),
        (document(rules={"all_reduce": [{"name": "ring", "most": 4}]}), "unknown 'most'"),
        (document(rules={"all_reduce": {}}), "all_reduce is not a list"),
        (document(ranks=0), "ranks is 0"),
        (document(ranks=True), "ranks is True"),
        (document(windows="yes"), "windows is 'yes'"),
        (document(segment_bytes=-1), "segment_bytes is -1"),
        (document(speed=9), "unknown 'speed'"),
        (document(placement="2"), "no placement on several hosts"),
        (document(placement="2*1"), "no placement on several hosts"),
        (document(placement=2), "placement is 2, not a text"),
        (document(placement="2x2"), "placement 2x2 has 4 ranks, not 2"),
        (document(1, placement="2x1"), "unknown 'placement'"),
        ("x" * (tuning_file.MOST_FILE_BYTES + 1), "more than"),
        (b"\xff\xfe", "decode"),
        (None, "No such file"),
    ],
    ids=["not JSON", "deep", "a list", "old", "other format", "empty", "algorithm", "collective",
         "no power", "unknown limit", "no rules", "no ranks", "true ranks", "windows", "segment",
         "unknown", "one host", "no placement", "a number as placement", "other ranks",
         "placement in format 1", "long", "not text", "not there"],
)  # fmt: skip
def test_damaged_files_are_left_out(file: Path, text: str | bytes | None, why: str) -> None:
    """What cannot be used is told with its reason and a remedy, and the job goes on as shipped."""
    if text is not None:
        file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.warns(RuntimeWarning, match=why) as said:
        assert tuning_file.load() == ""
    assert str(file) in str(said[0].message)
    assert "--tune" in str(said[0].message)


def test_what_is_no_file_is_left_out(file: Path) -> None:
    """A pipe that nobody writes to keeps no job waiting."""
    os.mkfifo(file)
    with pytest.warns(RuntimeWarning, match="not a regular file"):
        assert tuning_file.load() == ""


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["name", "most_bytes", "all_reduce", "ranks"]) | st.text(max_size=5),
        inner, max_size=3,
    ),
    max_leaves=8,
)  # fmt: skip


@given(
    st.dictionaries(
        st.sampled_from(["ranks", "windows", "segment_bytes", "about", "rules", "placement"]),
        json_values,
    )
)
def test_any_json_is_understood_or_refused(entry: dict[str, Any]) -> None:
    """Whatever stands in an entry, the answer is rules that can be used, or ValueError."""
    try:
        found = tuning_file.parse(document(**entry))
    except ValueError:
        return
    try:
        tuning_file.use_measured(found)
        assert chosen("all_reduce", 8) in tuning_table.candidates("all_reduce", 2, False)
    finally:
        tuning_file.use_measured([])


# ---- one file, several runs ----


def test_what_was_measured_before_stays() -> None:
    """A run replaces what it measured, collective by collective, and nothing else."""
    tree = (Rule("broadcast", "tree"),)
    doubling = (Rule("all_reduce", "doubling"),)
    old = [
        Measured(2, False, {"all_reduce": doubling, "broadcast": tree}, 4096),
        Measured(4, True, {}),
    ]
    (kept, new) = tuning_file.merge(old, RING)
    assert kept == old[1]
    assert new == Measured(2, False, {**RING.rules, "broadcast": tree}, 4096)


def test_placements_have_rows_of_their_own() -> None:
    """A run over hosts leaves what was measured with as many ranks on one, and the reverse."""
    placed = Measured(2, False, {"all_reduce": (Rule("all_reduce", "doubling"),)}, placement="2x1")
    assert tuning_file.merge([RING], placed) == [RING, placed]
    assert tuning_file.merge([placed], RING) == [placed, RING]


def test_as_shipped_again() -> None:
    """A collective for which nothing better is found any more leaves the file."""
    (new,) = tuning_file.merge([RING], Measured(2, False, {"all_reduce": ()}))
    assert new == Measured(2, False, {})
