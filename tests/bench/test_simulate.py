"""The model of calls on many hosts: its parts against recordings, and its command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cydist.bench import __main__ as bench
from cydist.bench.schedules import Level, Machine, play, record
from cydist.bench.simulate import COMPOSED, Constants, algorithms, composed, price, rounds

INSIDE = Level(1e-6, 1e-6, 1e-10, 1e-10)
BETWEEN = Level(10e-6, 2e-6, 1e-10, 1e-9)
MACHINE = Machine(INSIDE, BETWEEN, lambda collective, ranks, nbytes: 3e-6 + nbytes * 1e-10)
FLAT = [("barrier", "dissemination"), ("all_reduce", "doubling"), ("all_reduce", "ring"),
        ("all_gather", "bruck"), ("all_gather", "ring"), ("reduce_scatter", "ring")]  # fmt: skip


def blocks(hosts: int, each: int) -> list[int]:
    return [host for host in range(hosts) for _ in range(each)]


def test_a_message_costs_what_the_constants_say() -> None:
    """Both ends' overhead and copying, latency, and the wire."""
    logs = [
        [("send", 1, 0, 1000, 0), ("wait", 1, 0, 1000, 0)],
        [("recv", 0, 0, 1000, 0), ("wait", 0, 0, 1000, 0)],
    ]
    expected = 2 * (2e-6 + 1000e-10) + 10e-6 + 1000e-9
    assert play(logs, [0, 1], MACHINE) == pytest.approx(expected)


def test_messages_queue_on_the_link_of_their_host() -> None:
    """Two ranks of a host that send at once take the time of both on its wire."""
    logs = [
        [("send", 2 + rank, 0, 10000, 0), ("wait", 2 + rank, 0, 10000, 0)] for rank in range(2)
    ] + [[("recv", rank, 0, 10000, 0), ("wait", rank, 0, 10000, 0)] for rank in range(2)]
    expected = 2 * (2e-6 + 10000e-10) + 10e-6 + 2 * 10000e-9
    assert play(logs, [0, 0, 1, 1], MACHINE) == pytest.approx(expected)


def test_a_long_message_waits_for_its_receive() -> None:
    """Above the eager limit the bytes follow the receiver's answer: two latencies more."""
    nbytes = 1 << 20
    logs = [
        [("send", 1, 0, nbytes, 0), ("wait", 1, 0, nbytes, 0)],
        [("recv", 0, 0, nbytes, 0), ("wait", 0, 0, nbytes, 0)],
    ]
    expected = 2 * (2e-6 + nbytes * 1e-10) + 3 * 10e-6 + nbytes * 1e-9
    assert play(logs, [0, 1], MACHINE) == pytest.approx(expected)


def test_ranks_share_the_cores() -> None:
    """On one core the overheads of four ranks follow each other."""
    logs = record("barrier", "dissemination", [0, 1, 2, 3], 0)
    shared = Machine(INSIDE, BETWEEN, cores=1)
    assert play(logs, [0, 1, 2, 3], shared) > 8 * 2e-6 * 2


@pytest.mark.parametrize("key", FLAT, ids="-".join)
@pytest.mark.parametrize("shape", [(4, 4), (8, 2), (16, 4)], ids=str)
@pytest.mark.parametrize("nbytes", [1 << 10, 1 << 20])
def test_rounds_are_those_of_recordings(key: tuple[str, str], shape: tuple[int, int],
                                        nbytes: int) -> None:  # fmt: skip
    """The closed form of a larger world is within 20 % of a recording of a small one."""
    hosts, each = shape
    assert rounds(key, hosts * each, nbytes) is not None
    recorded = price(key, nbytes, hosts, hosts * each, MACHINE, windows=False,
                     places=blocks(hosts, each))  # fmt: skip
    closed = price(key, nbytes, hosts, hosts * each, MACHINE, windows=False)
    assert closed == pytest.approx(recorded, rel=0.2)


@pytest.mark.parametrize("key", COMPOSED, ids="-".join)
@pytest.mark.parametrize("windows", [True, False], ids=["windows", "messages"])
@pytest.mark.parametrize("nbytes", [1 << 10, 1 << 20])
def test_parts_make_the_whole(key: tuple[str, str], windows: bool, nbytes: int) -> None:
    """A composed price is within 20 % of the recording of all ranks."""
    places = blocks(8, 4)
    recorded = play(record(*key, places, nbytes, together=windows), places, MACHINE)
    assert composed(key, nbytes, 8, 4, MACHINE, windows) == pytest.approx(recorded, rel=0.2)


def constants(path: Path, within: bool) -> str:
    """Write a file with one cell."""
    level = {"latency": 1e-5, "overhead": 1e-6, "copying": 1e-10, "wire": 1e-10}
    cell = {"op": "barrier", "algorithm": "dissemination", "placement": "2+2", "bytes": 0,
            "rate": None, "measured": 1e-5, "predicted": 1e-5, "within": within}  # fmt: skip
    path.write_text(json.dumps({"inside": level, "between": level, "local": [], "cells": [cell]}))
    return str(path)


@pytest.mark.parametrize("within", [True, False], ids=["validated", "refuted"])
def test_only_validated_prices(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                               within: bool) -> None:  # fmt: skip
    """A price is printed where a measured cell agreed with the model, and nowhere else."""
    file = constants(tmp_path / "constants.json", within)
    assert bench.main(["--simulate", "--ranks", "65536", "--hosts", "1024", "--ops", "barrier",
                       "--constants", file]) == 0  # fmt: skip
    found = {line.split()[1]: line.split()[2:] for line in capsys.readouterr().out.splitlines()
             if line.startswith("barrier")}  # fmt: skip
    assert (found["dissemination"] == ["not", "validated"]) != within
    assert found["leaders"] == ["not", "validated"]


def test_table_plot_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--all shows every price that there is, --plot draws it, --json saves it."""
    pytest.importorskip("matplotlib")
    plot, file = tmp_path / "plot.png", tmp_path / "rows.json"
    assert bench.main(["--simulate", "--ranks", "16", "--hosts", "4", "--all", "--sizes", "8,1Mi",
                       "--plot", str(plot), "--json", str(file)]) == 0  # fmt: skip
    rows = json.loads(file.read_text())["rows"]
    assert {row["algorithm"] for row in rows if row["op"] == "all_reduce"} == {
        *algorithms("all_reduce")
    }
    assert all(row["seconds"] > 0 for row in rows)
    assert "(" in capsys.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("words", [["--ranks", "10", "--hosts", "4"], ["--ranks", "4", "--hosts",
                                   "4"], ["--constants", "nowhere.json"], ["--ops", "gone"]],
                         ids=["uneven", "alone", "no-file", "no-op"])  # fmt: skip
def test_wrong_options(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Each is explained, and exits with 2."""
    with pytest.raises(SystemExit) as end:
        bench.main(["--simulate", *words])
    assert end.value.code == 2
    assert "error" in capsys.readouterr().err


def test_interpolated_local_collectives() -> None:
    """Between two measured sizes a local collective costs what lies between."""
    known = Constants(INSIDE, BETWEEN, {("reduce", 2): [(0, 1.0), (100, 2.0)]}, [])
    assert known.together("reduce", 2, 50) == pytest.approx(1.5)
    assert known.together("reduce", 2, 200) == pytest.approx(3.0)
    with pytest.raises(KeyError):
        known.together("reduce", 64, 50)
