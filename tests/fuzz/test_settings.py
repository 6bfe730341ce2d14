"""Small texts from elsewhere: addresses, announcements, error files, options, settings."""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mutation import mutated

from cydist.backends.host.addresses import Address
from cydist.errors import RendezvousError
from cydist.launch import failures, options
from cydist.rendezvous import multicast
from cydist.tuning import table as tuning_table

pytestmark = pytest.mark.fuzz

numbers = st.integers() | st.floats() | st.sampled_from([0, 1, 65535, 65536, -1])
leaves = st.none() | st.booleans() | numbers | st.text(max_size=8) | st.just("127.0.0.1")
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


def fields(**values: st.SearchStrategy[object]) -> st.SearchStrategy[bytes]:
    """A JSON object with most of these fields."""
    choices = st.fixed_dictionaries({}, optional=values)
    return choices.map(lambda chosen: json.dumps(chosen).encode())


# Addresses of ranks

endpoints = st.builds(
    "{} {}".format,
    st.sampled_from(["127.0.0.1", "::1", "fe80::1%lo", "10.1", "x"]) | leaves,
    st.integers(0, 70_000) | leaves,
)
lanes = st.lists(endpoints, max_size=2).map(" ".join)
addresses = st.builds(
    lambda *lines: "\n".join(map(str, lines)).encode(),
    *(st.integers(-1, 3) | leaves, st.text(max_size=4) | leaves, lanes, lanes),
)
good = st.just(Address(1, "here", [[("127.0.0.1", 9), ("::1", 65535)]]).encode())


@given(addresses | mutated(addresses) | mutated(good) | st.binary(max_size=60))
@example(b"1e400\n\n::1 1")
@example(b"0\n\n::1 1e400")
@example(b"9" * 5000 + b"\n\n::1 1")
@example(b"0\n\n" + b"::1 1 " * 9999)
def test_addresses(published: bytes) -> None:
    """What another rank published is an address that one can connect to, or RendezvousError."""
    try:
        address = Address.decode(published)
    except RendezvousError:
        return
    assert Address.decode(address.encode()) == address
    assert address.rank >= 0
    assert address.lanes
    for lane in address.lanes:
        assert lane
        for host, port in lane:
            assert 0 < port < 65536
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
                sock.setblocking(False)
                with contextlib.suppress(OSError):
                    sock.bind((host, port))  # what connect would say of its form, bind says too


# Announcements on a multicast address


class Datagrams:
    """A socket that receives these, from one sender, and then nothing."""

    def __init__(self, datagrams: list[bytes]) -> None:
        self._left = iter(datagrams)

    def settimeout(self, seconds: float) -> None:
        pass

    def recvfrom(self, most: int) -> tuple[bytes, tuple[str, int]]:
        for datagram in self._left:
            return datagram[:most], ("10.0.0.1", 5)
        raise TimeoutError


KEY, PLACE = bytes(32), bytes(16)


def announcement(name: bytes, port: int) -> bytes:
    """As a member of the job says it."""
    here = bytes([10, 0, 0, 7])
    head = multicast._ANNOUNCEMENT.pack(multicast._MAGIC, PLACE, name, here, port, b"")[:-32]
    return head + hmac.digest(KEY, head, "sha256")


genuine = st.builds(announcement, st.binary(min_size=16, max_size=16), st.integers(0, 65535))


@given(st.lists(genuine | mutated(genuine) | st.binary(max_size=100), max_size=8))
def test_announcements(datagrams: list[bytes]) -> None:
    """Of any datagrams those of the job's members are heard, and nothing else."""
    members = {}
    for datagram in datagrams:
        if len(datagram) == multicast._ANNOUNCEMENT.size:
            _, _, name, _, port, _ = multicast._ANNOUNCEMENT.unpack(datagram)
            if datagram == announcement(name, port) and port:
                members[name] = ("10.0.0.7", port)
    group = multicast._MulticastGroup.__new__(multicast._MulticastGroup)
    group._key, group._place, group._announced = KEY, PLACE, {}
    group._family = socket.AF_INET
    group._receiver = Datagrams(datagrams)  # type: ignore[assignment]
    group._listen(time.monotonic() + 20)
    assert members == group._announced


# Error files of workers

words = st.text(max_size=20) | trees
inner = st.fixed_dictionaries({}, optional={"message": words})
reports = fields(message=words | inner, traceback=words, extraInfo=words)


@pytest.fixture(scope="module")
def error_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("worker") / "error.json"


@given(reports | mutated(reports) | trees.map(lambda tree: json.dumps(tree).encode()))
@example(b"[" * 100_000)
@example(b'{"message":' * 100_000)
@example(b'{"message": ' + b"9" * 5000 + b"}")
def test_error_files(error_file: Path, content: bytes) -> None:
    """Whatever a worker left in its error file, the launcher has lines to show, or none."""
    error_file.write_bytes(content)
    lines = failures._error_file(str(error_file))
    assert all(isinstance(line, str) for line in lines)
    assert len(lines) <= failures.TRACEBACK_LINES


# The command line, and settings

texts = st.text(max_size=12) | st.sampled_from(
    ["0", "1", "-1", "2", "1e999", "nan", "inf", "9" * 30, "0:1,0:2", ":", "0,1", "a:b", "cpu", "٣"]
)
# Two end well, and one of them replaces the user's secret.
flags = st.sampled_from(
    [f for f in options.parser()._flags if f not in ("-h", "--help", "-np", "--new-secret")]
)  # fmt: skip
lines = st.lists(flags | texts | st.builds("{}={}".format, flags, texts), max_size=6)


@given(lines.map(lambda line: [*line, __file__]))
@example(["--nproc-per-node", "9" * 30, "--redirects", "1", __file__])
def test_command_lines(line: list[str]) -> None:
    """Any command line is understood or refused in a sentence with exit code 2."""
    try:
        parsed = options.parse(line)
    except SystemExit as end:
        assert end.code == 2  # noqa: PT017
        return
    assert parsed.local_size >= 1
    assert 0 <= parsed.node_rank < parsed.nodes
    assert parsed.grace >= 0


SETTINGS: dict[str, Callable[[], object]] = {
    "CYDIST_ALGORITHM": lambda: tuning_table.forced(),
    "CYDIST_SEGMENT_BYTES": lambda: tuning_table.segment_bytes(),
}
algorithms = st.lists(
    st.sampled_from([f"{collective}:{name}" for collective, name in tuning_table.NEEDS]) | texts
).map(",".join)


@pytest.mark.parametrize("name", sorted(SETTINGS))
@given(text=texts | algorithms | mutated(algorithms.map(str.encode)).map(repr))
@example(text="9" * 5000)
@example(text="9" * 30)
@example(text="²")
def test_tuning(name: str, text: str) -> None:
    """A setting is understood, or ValueError names the variable."""
    with pytest.MonkeyPatch.context() as patch:
        for cached in (tuning_table.segment_bytes, tuning_table._chosen):
            cached.cache_clear()
        try:
            patch.setenv(name, text)
        except ValueError:
            return  # no environment can hold that
        try:
            value = SETTINGS[name]()
        except ValueError as error:
            assert name in str(error)  # noqa: PT017
        else:
            assert isinstance(value, dict) or 0 < value < 1 << 63
    for cached in (tuning_table.segment_bytes, tuning_table._chosen):
        cached.cache_clear()
