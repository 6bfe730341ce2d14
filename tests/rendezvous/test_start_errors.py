"""What a host may refuse while a job starts: ports and descriptors."""

from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest
from transport_ranks import free_port

import cydist as dist
from cydist.errors import DistNetworkError, RendezvousError
from cydist.launch import environment
from cydist.launch.environment import new_ports

HOST = "127.0.0.1"

START = """
import os, resource, sys
import numpy
import cydist as dist
from cydist.backends.host import create as host  # what is imported needs a descriptor, too

least, most = map(int, sys.argv[1:])
used = len(os.listdir("/proc/self/fd"))
for spare in range(least, most):
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, 4096))
    try:
        dist.init_process_group("tcp", rank=0, world_size=1, timeout=0.2)
        dist.destroy_process_group()
    except dist.DistError as error:
        assert "Too many open files" in str(error) or "no file descriptor" in str(error), error
    except BaseException as error:
        print(spare, repr(error))
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))
dist.init_process_group("tcp", rank=0, world_size=1, timeout=30)
dist.destroy_process_group()
print("done")
"""


@pytest.mark.parametrize("least", [0, 8, 16])
def test_too_few_descriptors_are_a_typed_error(least: int) -> None:
    """With any number of descriptors left, init_process_group works or raises a DistError that says
    what lacks; afterwards, with enough of them, it works."""
    found = subprocess.run(
        [sys.executable, "-c", START, str(least), str(least + 8)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (found.stdout, found.returncode) == ("done\n", 0), found.stderr[-2000:]


@pytest.fixture
def no_descriptor() -> Iterator[None]:
    """None is left in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_launcher_without_descriptors_says_so(no_descriptor: None) -> None:
    """And does not blame the address."""
    with pytest.raises(RendezvousError, match=r"gets no port there: .*Too many open files"):
        new_ports(HOST)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "a..b", 64 * "x"])
def test_an_address_that_is_not_ours(host: str) -> None:
    """The launcher names it."""
    with pytest.raises(
        RendezvousError, match=f"--master-addr {host}: it is not an address of this"
    ):
        new_ports(host)


def test_the_stores_port_is_not_master_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first free port is the one that the user keeps for other libraries, the store has
    another one."""
    bound = [environment._bind(HOST) for _ in range(2)]
    numbers = [each.getsockname()[1] for each in bound]
    monkeypatch.setattr(environment, "_bind", lambda host: bound.pop(0))
    with closing(new_ports(HOST, numbers[0])) as ports:
        assert (ports.master, ports.store.getsockname()[1]) == tuple(numbers)


def test_a_socket_whose_port_another_listens_on() -> None:
    """A TCPStore that is given a bound socket says that the port is listened on elsewhere."""
    mine, other = socket.socket(), socket.socket()
    with mine, other:
        for each in (mine, other):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        mine.bind((HOST, 0))
        port = mine.getsockname()[1]
        other.bind((HOST, port))
        other.listen()
        with pytest.raises(DistNetworkError, match=f"port {port}.*Another process listens there"):
            dist.TCPStore(HOST, port, 1, True, master_listen_fd=mine.fileno())
        assert mine.getsockname()[1] == port  # it is the caller's still


def test_a_descriptor_that_is_no_socket() -> None:
    """A TCPStore names it."""
    with open(os.devnull) as file, pytest.raises(DistNetworkError, match="is not a socket"):
        dist.TCPStore(HOST, free_port(), 1, True, master_listen_fd=file.fileno())


def test_a_store_without_descriptors(no_descriptor: None) -> None:
    """A TCPStore says what to do, and keeps no port."""
    with pytest.raises(DistNetworkError, match="ulimit -n") as caught:
        dist.TCPStore(HOST, 0, 1, True, timeout=0.1)
    assert os.strerror(errno.EMFILE) in str(caught.value)
