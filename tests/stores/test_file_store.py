"""FileStore: a file that processes share, and that goes when they go."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from cydist.errors import DistStoreError, StoreTimeoutError
from cydist.stores import FileStore, file
from cydist.stores.file import log_entry
from cydist.stores.protocol import LENGTH, Op, StoreRequest


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
    path.write_bytes(whole + log_entry(StoreRequest(Op.SET, (b"half",), (b"x" * 100,)))[:50])
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


@pytest.fixture
def short_log(monkeypatch: pytest.MonkeyPatch) -> int:
    """A log is written again when it is longer than so many bytes."""
    monkeypatch.setattr("cydist.stores.file._SHORTEST_BYTES", 4096)
    return 4096


def test_log_stays_short(tmp_path: Path, short_log: int) -> None:
    """A job that uses the store for long has a file of the size of what is in it; nothing that two
    users wrote in turn is lost, and the count of users goes on."""
    path = tmp_path / "store"
    (tmp_path / "store.new").write_bytes(b"what somebody left who died while he wrote")
    first, second = FileStore(str(path), 2), FileStore(str(path), 2)
    for i in range(500):
        (first if i % 2 else second).add("n", 1)
        first.set(f"key {i % 10}", f"{i}")
        second.queue_push("q", f"{i}")
        if i >= 3:
            assert first.queue_pop("q") == b"%d" % (i - 3)
        assert path.stat().st_size <= 2 * short_log
    for store in (first, second, FileStore(str(path))):
        assert store.get("n") == b"500"
        assert store.multi_get([f"key {i}" for i in range(10)]) == [
            b"%d" % i for i in range(490, 500)
        ]
        assert store.queue_len("q") == 3
    assert [second.queue_pop("q") for _ in range(3)] == [b"497", b"498", b"499"]
    assert sorted(os.listdir(tmp_path)) == ["store", "store.users"]


def test_who_waits_sees_through_a_new_log(tmp_path: Path, short_log: int) -> None:
    """A process that waits for a key gets it from the file that has taken the place of its own."""
    path = str(tmp_path / "store")
    code = (
        "import sys; from cydist.stores import FileStore; s = FileStore(sys.argv[1])\n"
        "s.set('ready', ''); print(s.get('key').decode())"
    )
    waiter = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE)
    store = FileStore(path)
    store.get("ready")
    with open(path) as before:
        for _ in range(100):
            store.set("filler", "x" * 100)
        assert os.fstat(before.fileno()).st_nlink == 0
    store.set("key", "v")
    assert waiter.communicate(timeout=60)[0] == b"v\n"


def test_fresh_empties_what_nobody_uses(tmp_path: Path) -> None:
    """A file whose users were killed is emptied, one that somebody uses is not, a rank that
    forked."""
    path = str(tmp_path / "store")
    code = (
        "import os, signal, sys; from cydist.stores import FileStore; s = FileStore(sys.argv[1])\n"
        "s.set('key', 'v')\n"
        "if os.fork() == 0:\n"
        "    os.write(1, b'ready\\n'); sys.stdin.read(); os._exit(0)\n"
        "os.write(1, b'ready\\n'); signal.pause()"
    )
    user = subprocess.Popen(
        [sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert user.stdout is not None
    assert [user.stdout.readline() for _ in range(2)] == [b"ready\n"] * 2
    second = FileStore(path, fresh=True)
    assert second.get("key") == b"v"
    user.kill()
    user.wait()
    assert FileStore(path, fresh=True).check(["key"])
    second.close()
    del second
    assert not FileStore(path, fresh=True).check(["key"])
    assert user.stdin is not None
    user.stdin.close()
    user.stdout.close()


def test_fresh_sees_users_through_a_new_log(tmp_path: Path, short_log: int) -> None:
    """A user whose file was replaced while it was idle still counts, when the one that replaced it
    has ended."""
    path = str(tmp_path / "store")
    idle, writer = FileStore(path), FileStore(path)
    with open(path) as before:
        for _ in range(100):
            writer.set("filler", "x" * 100)
        assert os.fstat(before.fileno()).st_nlink == 0
    writer.set("key", "v")
    writer.close()
    third = FileStore(path, fresh=True)
    assert third.check(["key"])
    assert idle.get("key") == b"v"
    for store in (idle, third):
        store.close()
    assert not FileStore(path, fresh=True).check(["key"])


def test_without_a_second_file_the_first_has_the_locks(tmp_path: Path) -> None:
    """Where a user may not make the second file, users are seen by the first."""
    path = str(tmp_path / "store")
    (tmp_path / "store.users").mkdir()
    first = FileStore(path)
    first.set("key", "v")
    second = FileStore(path, fresh=True)
    assert second.check(["key"])
    first.close()
    second.close()
    assert not FileStore(path, fresh=True).check(["key"])


def test_fresh_leaves_other_files_alone(tmp_path: Path) -> None:
    """A file that is no FileStore's is never emptied."""
    path = tmp_path / "notes"
    path.write_text("my notes")
    with pytest.raises(DistStoreError, match="not a FileStore"):
        FileStore(str(path), fresh=True)
    assert path.read_text() == "my notes"


def test_damaged_log_is_not_counted_twice(tmp_path: Path) -> None:
    """What stands before a broken request is replayed once, also when the file is repaired."""
    path = tmp_path / "store"
    store, other = FileStore(str(path)), FileStore(str(path))
    other.add("n", 1)
    whole = path.read_bytes()
    path.write_bytes(whole + log_entry(StoreRequest(Op.SET, (b"key",))))
    with pytest.raises(DistStoreError, match="damaged: SET does not take 1 key and 0 values"):
        store.add("n", 1)
    path.write_bytes(whole)
    assert store.add("n", 1) == 2


@pytest.mark.parametrize("beginning", [b"", LENGTH.pack(2**32 - 1)], ids=["zeros", "long request"])
def test_a_file_that_claims_much_takes_no_memory(tmp_path: Path, beginning: bytes) -> None:
    """A process that may write there makes it look long, at no cost."""
    path = tmp_path / "store"
    store, other = FileStore(str(path)), FileStore(str(path))
    with path.open("ab") as log:
        log.write(beginning)
        log.truncate(1 << 40)
    tracemalloc.start()
    try:
        for each in (store, other):
            with pytest.raises(DistStoreError, match="damaged: a request of"):
                each.add("n", 1)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1 << 26


def test_a_file_holds_as_much_as_a_tcp_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user that asks for more is refused, and the others go on."""
    monkeypatch.setattr(file, "MAX_TOTAL_BYTES", 10_000)
    path = str(tmp_path / "store")
    store, other = FileStore(path), FileStore(path)
    with pytest.raises(DistStoreError, match="full"):
        store.set("key", bytes(9_950))
    with pytest.raises(DistStoreError, match="at most 10000"):
        store.multi_set(["key"] * 9, [bytes(2_000)] * 9)
    store.set("key", "v")
    assert other.get("key") == b"v"


def test_a_request_of_many_pieces_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long and short ones, however little is read at once."""
    monkeypatch.setattr(file, "_READ_BYTES", 7)
    path = str(tmp_path / "store")
    store, other = FileStore(path), FileStore(path)
    for size in (0, 1, 100, 5):
        store.set(f"key {size}", bytes(size))
    assert [len(other.get(f"key {size}")) for size in (0, 1, 100, 5)] == [0, 1, 100, 5]


def test_a_log_without_end_is_read_until_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody appends more than can be read."""
    path = str(tmp_path / "store")
    store, other = FileStore(path), FileStore(path)
    monkeypatch.setattr(file, "_REPLAY_SECONDS", -1.0)
    store.set("key", "v")
    with pytest.raises(StoreTimeoutError, match="too long to read"):
        other.wait(["key"], 0.0)


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_only_a_regular_file_is_used(tmp_path: Path, kind: str) -> None:
    """A process that may write in the directory puts something else there."""
    path = tmp_path / "store"
    os.mkfifo(path) if kind == "fifo" else path.symlink_to("/dev/zero")
    with pytest.raises(DistStoreError, match="not a regular file"):
        FileStore(str(path))


def test_a_lock_of_another_program_is_a_typed_error(tmp_path: Path) -> None:
    """On the file by which users are counted; the log is free again afterwards."""
    path = tmp_path / "store"
    with (tmp_path / "store.users").open("w") as users:
        file._flock(users.fileno(), fcntl.F_WRLCK, file._IN_USE)
        with pytest.raises(DistStoreError, match="another program keeps it"):
            FileStore(str(path))
    assert FileStore(str(path), timeout=5).add("n", 1) == 1


def test_a_new_log_is_no_file_of_somebody_else(tmp_path: Path, short_log: int) -> None:
    """Another process has put one there beforehand, or a FIFO that takes no more."""
    path, beside = tmp_path / "store", tmp_path / "store.new"
    beside.touch()
    with beside.open() as theirs:
        store = FileStore(str(path))
        first = path.stat().st_ino
        while path.stat().st_ino == first:
            store.set("key", bytes(short_log))
        assert path.stat().st_ino != os.fstat(theirs.fileno()).st_ino
