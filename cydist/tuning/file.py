"""The tuning file: crossovers that `python -m cydist.bench --tune` measured.

They are in a file of the user, named after the host. Hosts may have different files, or none, but
all ranks must choose alike. So the file of rank 0's host counts for the whole job, and
init_process_group distributes it. It contains JSON:

    {"format": 2, "cydist": "0.9.0", "measured": [
        {"ranks": 2, "windows": true, "segment_bytes": 131072, "about": {...},
         "rules": {"all_reduce": [{"name": "flat", "most_bytes": 4096}, {"name": "staged"}]}},
        {"ranks": 4, "windows": false, "placement": "2x2", "segment_bytes": null, "about": {...},
         "rules": {"all_reduce": [{"name": "leaders", "most_bytes": 65536}, {"name": "lanes"}]}}]}

Format 1 had no placements, and is read, too.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from cydist import config
from cydist.config import __version__
from cydist.errors import warn_user
from cydist.net.auth import user_secret_path
from cydist.stores import Store
from cydist.tuning import table as tuning_table
from cydist.tuning.table import FORMER_NAMES, NEEDS, Rule

if TYPE_CHECKING:
    from pathlib import Path  # slow to import, and only rank 0 needs it

FORMAT = 2
READABLE = (1, FORMAT)
MOST_FILE_BYTES = 1 << 20  # a file from `save` has some kilobytes
MOST_RANKS = 1 << 20
MOST_SEGMENT = 1 << 40
KEY = "crossings"  # codespell:ignore crossings


class Measured(NamedTuple):
    """The measured choices for groups of `ranks` ranks, with or without windows.

    Attributes:
        placement: How the ranks were spread over several hosts, as table.placement_of says it; "":
            they shared one.
        segment_bytes: None: the default.
        rules: By collective, in the order in which they are tried.
        about: Date, machine and command of the measurement, for readers.
    """

    ranks: int
    windows: bool
    rules: Mapping[str, tuple[Rule, ...]]
    segment_bytes: int | None = None
    about: Mapping[str, str] = {}
    placement: str = ""

    def key(self) -> tuple[int, bool, str]:
        """Return for which groups this holds."""
        return self.ranks, self.windows, self.placement


def share_from_rank_0(store: Store, rank: int) -> None:
    """Use the file of rank 0's host on all ranks of a job, and no other file after that."""
    if rank == 0:
        store.set(KEY, load())
    use_measured(parse(store.get(KEY).decode()))


def use_measured(measured: list[Measured]) -> None:
    """Use these choices, and the shipped table for all others."""
    tuning_table.use_rules(
        {(name, *each.key()): rules
         for each in measured for name, rules in each.rules.items()},
        {each.key(): each.segment_bytes
         for each in measured if each.segment_bytes is not None},
    )  # fmt: skip


def default_path() -> Path | None:
    """Return the path of this user's file for this host, next to the user's secret, or the path in
    CYDIST_TUNING. None: tuning is off, or the user has no home."""
    setting = config.TUNING.get().strip()
    if setting.lower() == "off":
        return None
    if setting:
        from pathlib import Path

        return Path(setting)
    host = socket.gethostname().replace("/", "-") or "localhost"
    try:
        return user_secret_path().with_name(f"tuning-{host}.json")
    except RuntimeError:  # no HOME, and an unknown user
        return None


def load() -> str:
    """Return the text of the tuning file; "" if there is none, or tuning is off.

    An unusable file is ignored, so that no job fails because of it. A RuntimeWarning names it if
    CYDIST_TUNING names it or it could be read.
    """
    path = default_path()
    if path is None:
        return ""
    try:
        text = read(path)
        parse(text)
    except OSError as error:
        if not config.TUNING.get().strip():
            return ""
        why: Exception = error
    except ValueError as error:
        why = error
    else:
        return text
    warn_user(
        f"{path} is not used, but the shipped crossovers between algorithms: {why}. Measure anew "
        f"with `python -m cydist.bench --tune`, or set {config.TUNING.names[0]}=off"
    )
    return ""


def read(path: Path) -> str:
    """Return a file's text. Raises OSError, and ValueError if it is not a text file or too long."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("it is not a regular file")
        data = file.read(MOST_FILE_BYTES + 1)
    if len(data) > MOST_FILE_BYTES:
        raise ValueError(f"it has more than {MOST_FILE_BYTES} bytes")
    return data.decode()


def parse(text: str) -> list[Measured]:
    """Parse a tuning file; "" changes nothing. Raises ValueError with the position for invalid
    content."""
    if not text:
        return []
    import json  # slow to import, and few machines have such a file

    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    found = _members(found, "the file", {"format", "cydist", "measured"})
    if found.get("format") not in READABLE or found.get("cydist") != __version__:
        raise ValueError(
            f"it is of cydist {found.get('cydist')!r}, format {found.get('format')!r}; "
            f"this is cydist {__version__!r}, format {FORMAT}"
        )
    known = {"ranks", "windows", "segment_bytes", "about", "rules"}
    known |= {"placement"} if found["format"] == FORMAT else set()
    return [_measured(each, known) for each in _list(found.get("measured"), "measured")]


def _measured(entry: object, known: set[str]) -> Measured:
    entry = _members(entry, "an entry", known)
    windows = entry.get("windows")
    if not isinstance(windows, bool):
        raise ValueError(f"windows is {windows!r}, not true or false")
    about = _members(entry.get("about", {}), "about")
    rules = _members(entry.get("rules", {}), "rules")
    segment = entry.get("segment_bytes")
    ranks = _number(entry.get("ranks"), "ranks", MOST_RANKS)
    placement = entry.get("placement", "")
    if not isinstance(placement, str):
        raise ValueError(f"placement is {str(placement)[:40]}, not a text")
    if placement and (placed := tuning_table.ranks_in(placement)) != ranks:
        raise ValueError(f"placement {placement[:40]} has {placed} ranks, not {ranks}")
    return Measured(
        ranks,
        windows,
        {name: tuple(_rule(name, each) for each in _list(rules[name], name)) for name in rules},
        None if segment is None else _number(segment, "segment_bytes", MOST_SEGMENT),
        {name: str(said) for name, said in about.items()},
        placement,
    )


def _rule(collective: str, row: object) -> Rule:
    row = _members(row, f"a rule for {collective}", {"name", "most_bytes"})
    name, most = row.get("name"), row.get("most_bytes")
    if isinstance(name, str):
        name = FORMER_NAMES.get(name, name)
    if not isinstance(name, str) or (collective, name) not in NEEDS:
        raise ValueError(f"there is no algorithm {collective}:{name}")
    if most is None:
        return Rule(collective, name)
    most = _number(most, "most_bytes", 1 << 62)
    if most & (most - 1):
        raise ValueError(f"most_bytes is {most}, not a power of two")
    return Rule(collective, name, most)


def _members(value: object, what: str, known: set[str] | None = None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not an object of JSON")
    if known is not None and (unknown := value.keys() - known):
        raise ValueError(f"{what} has an unknown {min(unknown)!r}")
    return value


def _list(value: object, what: str) -> list[object]:
    if not isinstance(value, list):
        raise ValueError(f"{what} is not a list of JSON")
    return value


def _number(value: object, what: str, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        raise ValueError(f"{what} is {str(value)[:40]}, not a number from 1 to {most}")
    return value


def merge(old: list[Measured], new: Measured) -> list[Measured]:
    """Return `old` updated with `new`, which replaces entries for the same kind of group.

    A collective without rows in `new` is as shipped.
    """
    kept = [each for each in old if each.key() != new.key()]
    same = [each for each in old if each not in kept]
    rules = {name: rows for each in same for name, rows in each.rules.items()}
    segments = [each.segment_bytes for each in (*same, new) if each.segment_bytes is not None]
    segment = segments[-1] if segments else None
    rules |= new.rules
    rules = {name: rows for name, rows in rules.items() if rows}
    return [*kept, new._replace(rules=rules, segment_bytes=segment)]


def save(measured: list[Measured], path: Path) -> None:
    """Write a file that only this user can change, completely or not at all. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(8).hex()}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(encode(measured))
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


def encode(measured: list[Measured]) -> str:
    """Return the text of a file that `parse` can read."""
    import json

    entries = [
        {
            "ranks": each.ranks,
            "windows": each.windows,
            **({"placement": each.placement} if each.placement else {}),
            "segment_bytes": each.segment_bytes,
            "about": dict(each.about),
            "rules": {name: [_row(rule) for rule in rules] for name, rules in each.rules.items()},
        }
        for each in measured
    ]
    return (
        json.dumps({"format": FORMAT, "cydist": __version__, "measured": entries}, indent=1) + "\n"
    )


def _row(rule: Rule) -> dict[str, Any]:
    limit = {} if rule.most_bytes is None else {"most_bytes": rule.most_bytes}
    return {"name": rule.name, **limit}
