"""FileStore: a file that processes share, and that goes when they go."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cydist.errors import DistStoreError, StoreTimeoutError
from cydist.stores import FileStore
from cydist.stores.protocol import Op, Request, encode_request


def test_file_is_shared_by_processes(tmp_path: Path) -> None:
    """Eight processes add to one counter in one file, and no increment is lost."""
    path = str(tmp_path / "store")
    code = (
        "import os, sys\n"
        "from cydist.stores import FileStore\n"
        "for _ in range(8):\n"
        "    if os.fork() == 0:\n"
        "        store = FileStore(sys.argv[1])\n"
        "        [store.add('n', 1) for _ in range(50)]\n"
        "        os._exit(0)\n"
        "assert all(os.wait()[1] == 0 for _ in range(8))"
    )
    subprocess.run([sys.executable, "-c", code, path], check=True, timeout=60)
    assert FileStore(path).get("n") == b"400"


def test_last_user_removes_the_file(tmp_path: Path) -> None:
    """With a fixed number of users the file goes with the last of them."""
    path = tmp_path / "store"
    first, second = FileStore(str(path), 2), FileStore(str(path), 2)
    first.set("key", "v")
    first.close()
    assert second.get("key") == b"v"
    second.close()
    assert not path.exists()


def test_file_stays_while_users_are_missing(tmp_path: Path) -> None:
    """One of two users leaving does not remove the file before the other came."""
    path = tmp_path / "store"
    first = FileStore(str(path), 2)
    first.close()
    assert path.exists()


def test_open_ended_file_stays(tmp_path: Path) -> None:
    """Without a number of users the file and its keys outlive the store."""
    path = tmp_path / "store"
    first = FileStore(str(path))
    first.set("key", "v")
    first.close()
    assert FileStore(str(path)).get("key") == b"v"


def test_cut_off_request_is_overwritten(tmp_path: Path) -> None:
    """What a writer that died left half written is ignored, then written over."""
    path = tmp_path / "store"
    store = FileStore(str(path))
    store.set("key", "v")
    whole = path.read_bytes()
    path.write_bytes(whole + encode_request(Request(Op.SET, (b"half",), (b"x" * 100,)))[:50])
    assert not store.check(["half"])
    store.set("next", "1")
    fresh = FileStore(str(path))
    assert sorted(fresh.list_keys()) == ["key", "next"]


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    """A file that is something else is refused and not changed."""
    path = tmp_path / "notes"
    path.write_text("my notes")
    with pytest.raises(DistStoreError, match="not a FileStore"):
        FileStore(str(path))
    assert path.read_text() == "my notes"


def test_missing_directory_is_named(tmp_path: Path) -> None:
    """A path in a directory that does not exist is an error that shows it."""
    with pytest.raises(DistStoreError, match="nowhere"):
        FileStore(str(tmp_path / "nowhere" / "store"))


def test_file_store_works_in_a_forked_child(tmp_path: Path) -> None:
    """A child gets locks of its own: parent and child both count."""
    store = FileStore(str(tmp_path / "store"))
    store.add("n", 1)
    child = os.fork()
    if child == 0:
        try:
            store.add("n", 1)
        finally:
            os._exit(0)
    store.add("n", 1)
    assert os.waitpid(child, 0)[1] == 0
    assert store.get("n") == b"3"


def test_locked_file_is_a_timeout(tmp_path: Path) -> None:
    """A process that keeps the file locked, stopped as it may be, costs the timeout."""
    path = str(tmp_path / "store")
    store = FileStore(path)
    code = (
        "import sys, time; from cydist.stores import FileStore; s = FileStore(sys.argv[1])\n"
        "with s._log.locked(time.monotonic() + 9, exclusive=True):\n"
        "    print('locked', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"locked\n"
    store.set_timeout(0.05)
    with pytest.raises(StoreTimeoutError, match="locked"):
        store.set("key", "v")
    holder.communicate(timeout=30)
    store.set_timeout(30)
    store.set("key", "v")
    assert store.get("key") == b"v"
