"""What cydistrun starts: programs, their arguments, variables, port and secret."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from launched_hosts import without_notices

if TYPE_CHECKING:
    from conftest import Launcher


def test_every_rank_runs_with_its_variables(launcher: Launcher) -> None:
    """Each worker finds torchrun's variables, with its own ranks."""
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK "
    names += "ROLE_WORLD_SIZE ROLE_NAME MASTER_ADDR OMP_NUM_THREADS CYDIST_RUN_ID "
    names += "CYDIST_RESTART_COUNT"
    script = launcher.script(f"print(*[os.environ[name] for name in {names.split()}])")
    result = launcher.run("--nproc-per-node", "3", "--rdzv-id", "job", "--role", "r", script)
    assert (result.returncode, without_notices(result.stderr)) == (0, "")
    assert sorted(result.stdout.splitlines()) == [
        f"[{rank}] {rank} {rank} 3 3 0 1 {rank} 3 r 127.0.0.1 1 job 0" for rank in range(3)
    ]


def test_arguments_reach_the_script(launcher: Launcher) -> None:
    """What stands after the script is the script's, options included."""
    script = launcher.script("print(sys.argv[1:])")
    result = launcher.run("--nproc_per_node=1", script, "--some_option", "-n", "x y", "--local_r=1")
    assert result.stdout == "[0] ['--some_option', '-n', 'x y', '--local_r=1']\n"


NOT_SET = {"TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
BY_JOB = {  # differ from job to job, and with the place of the store
    "MASTER_PORT", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_USE_AGENT_STORE",
}  # fmt: skip


def test_ranks_find_torchruns_variables(launcher: Launcher) -> None:
    """With torchrun's values, except two, for which docs/guide/launching.md gives the reason."""
    pytest.importorskip("torch.distributed.run")
    script = launcher.script(
        "with open(f'{sys.argv[1]}-{rank}', 'w') as file: json.dump(dict(os.environ), file)"
    )
    common = ("--nproc-per-node", "2", "--max-restarts", "1", "--role", "trainer", script)
    for name, module in (("ours", "cydist.run"), ("torchs", "torch.distributed.run")):
        command = (sys.executable, "-m", module, *common, str(launcher.directory / name))
        assert launcher.start_command(*command).wait(60) == 0
    for rank in range(2):
        found = [
            json.loads((launcher.directory / f"{name}-{rank}").read_text())
            for name in ("ours", "torchs")
        ]
        added = {name: value for name, value in found[1].items() if name not in os.environ}
        assert added.keys() - found[0].keys() == NOT_SET
        same = added.keys() - NOT_SET - BY_JOB
        assert len(same) >= 12
        assert {name: found[0][name] for name in same} == {name: added[name] for name in same}


OLD_PROGRAM = """
import argparse, os
parser = argparse.ArgumentParser()
parser.add_argument("--local-rank", "--local_rank", type=int)
parser.add_argument("rest", nargs="*")
args = parser.parse_args()
print(args.local_rank, os.environ["LOCAL_RANK"], args.rest)
"""


@pytest.mark.parametrize(
    ("module", "options", "passed"),
    [
        ("cydist.launch", [], True),
        ("cydist.launch", ["--use-env"], False),
        ("cydist.launch", ["--use_env"], False),
        ("cydist.launch", ["--use-env=True"], False),
        ("cydist.run", [], False),
        ("cydist.run", ["--pass-local-rank"], True),
    ],
    ids=[
        "launch",
        "launch --use-env",
        "launch --use_env",
        "launch --use-env=True",
        "run",
        "run --pass-local-rank",
    ],
)
def test_local_rank_argument(
    launcher: Launcher, module: str, options: list[str], passed: bool
) -> None:
    """`python -m cydist.launch` gives scripts --local-rank, unless told not to."""
    script = launcher.script(OLD_PROGRAM)
    command = [sys.executable, "-m", module, "-n", "2", *options, script, "a"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert sorted(result.stdout.splitlines()) == [
        f"[{rank}] {rank if passed else None} {rank} ['a']" for rank in range(2)
    ]


@pytest.mark.parametrize("how", [(), ("-m",)], ids=["script", "module"])
def test_local_rank_is_the_first_argument(launcher: Launcher, how: tuple[str, ...]) -> None:
    """--local-rank stands before the script's own arguments, as torch.distributed.launch's does."""
    launcher.script("import sys; print(sys.argv[1:])")
    (launcher.directory / "somewhere.py").write_text("import sys; print(sys.argv[1:])")
    what = "somewhere" if how else "somewhere.py"
    result = launcher.run("--pass-local-rank", *how, what, "a", "-b")
    assert result.stdout == "[0] ['--local-rank=0', 'a', '-b']\n"


def test_a_program_need_not_know_local_rank(launcher: Launcher) -> None:
    """`python -m cydist.launch --no-python` needs --use-env, as torch.distributed.launch does."""
    command = [sys.executable, "-m", "cydist.launch", "--no-python"]
    refused, started = (
        subprocess.run([*command, *more, "true"], capture_output=True, text=True, timeout=60)
        for more in ([], ["--use-env"])
    )
    assert (refused.returncode, started.returncode) == (2, 0)
    assert "--no-python needs --use-env" in refused.stderr


def test_module(launcher: Launcher) -> None:
    """-m runs a module, found from the working directory as with python -m."""
    (launcher.directory / "somewhere.py").write_text("import sys; print(__name__, sys.argv[1:])")
    assert launcher.run("-m", "somewhere", "a").stdout == "[0] __main__ ['a']\n"


def test_program(launcher: Launcher) -> None:
    """--no-python runs a program of another language."""
    result = launcher.run("-n", "2", "--no-python", "sh", "-c", "echo rank $RANK; exit $RANK")
    assert result.returncode == 1
    assert "[1] rank 1\n" in result.stdout


def test_the_stores_port_is_listened_on(launcher: Launcher) -> None:
    """Before rank 0 serves, no other process can bind the store's port; rank 0 finds the socket
    in CYDIST_STORE_FD."""
    script = launcher.script(
        "import socket",
        "print('port', os.environ['CYDIST_STORE_PORT'].split()[0],",
        "      'CYDIST_STORE_FD' in os.environ, flush=True)",
        "sys.stdin.readline()",
        "if rank == 0:",
        "    with socket.socket(fileno=int(os.environ['CYDIST_STORE_FD'])) as store:",
        "        print(store.getsockname(), store.accept()[0].recv(5))",
    )
    process = launcher.start("-n", "2", script, stdin=subprocess.PIPE)
    seen = launcher.read_until(process, lambda seen: seen.count(b"\n") == 2)
    found = re.findall(rb"\[(\d)\] port (\d+) (\w+)\n", seen)
    port = int(found[0][1])
    assert sorted(found) == [(b"0", b"%d" % port, b"True"), (b"1", b"%d" % port, b"False")]
    for option in (None, socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        with socket.socket() as other:
            if option is not None:
                other.setsockopt(socket.SOL_SOCKET, option, 1)
            with pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
    with socket.create_connection(("127.0.0.1", port), timeout=10) as early:
        early.sendall(b"early")
        out, _ = process.communicate(b"\n", timeout=60)
    assert out.decode() == f"[0] ('127.0.0.1', {port}) b'early'\n"


def test_master_port_is_reserved(launcher: Launcher) -> None:
    """No other job is given MASTER_PORT, and rank 0 can listen there itself."""
    script = launcher.script(
        "import socket",
        "print('port', os.environ['MASTER_PORT'], flush=True)",
        "sys.stdin.readline()",
        "if rank == 0:",
        "    with socket.socket() as own:",
        "        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)",
        "        own.bind(('127.0.0.1', int(os.environ['MASTER_PORT'])))",
        "        own.listen()",
        "        print('listens')",
    )
    process = launcher.start("-n", "2", script, stdin=subprocess.PIPE)
    seen = launcher.read_until(process, lambda seen: seen.count(b"\n") == 2)
    port = int(re.findall(rb"port (\d+)\n", seen)[0])
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    out, _ = process.communicate(b"\n", timeout=60)
    assert out == b"[0] listens\n"


@pytest.mark.parametrize("given", [False, True], ids=["a free port", "--master-port"])
def test_a_listener_on_master_port_does_not_stop_the_job(launcher: Launcher, given: bool) -> None:
    """A rank that listens on MASTER_PORT before rank 0 gets nothing of cydist's."""
    script = launcher.script(
        "import cydist as dist",
        "print('port', os.environ['MASTER_PORT'], flush=True)",
        "sys.stdin.readline() if rank == 0 else None",
        "for _ in range(2):",
        "    dist.init_process_group(timeout=30)",
        "    whole = [None, None]",
        "    dist.all_gather_object(whole, rank)",
        "    dist.destroy_process_group()",
        "print(whole)",
    )
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        options = []
        if given:
            other.bind(("127.0.0.1", 0))
            options = [f"--master-port={other.getsockname()[1]}"]
        process = launcher.start("-n", "2", *options, script, stdin=subprocess.PIPE)
        seen = launcher.read_until(process, lambda seen: seen.count(b"\n") == 2)
        if not given:
            other.bind(("127.0.0.1", int(re.findall(rb"port (\d+)\n", seen)[0])))
        other.listen()
        other.setblocking(False)
        out, _ = process.communicate(b"\n", timeout=60)
        assert sorted(out.splitlines()) == [b"[0] [0, 1]", b"[1] [0, 1]"]
        with pytest.raises(BlockingIOError):
            other.accept()


def test_cydists_names_of_rank_0s_address_are_removed(launcher: Launcher) -> None:
    """They would lead the ranks elsewhere than to their launcher."""
    script = launcher.script("print([name for name in os.environ if 'CYDIST_MASTER' in name])")
    given = {"CYDIST_MASTER_ADDR": "192.0.2.9", "CYDIST_MASTER_PORT": "1"}
    out, _ = launcher.start("-n", "1", script, env=given).communicate(timeout=60)
    assert out.splitlines() == [b"[0] []"]


def test_secret_is_not_in_sight(launcher: Launcher) -> None:
    """All workers read one secret from a descriptor; no environment or command line holds it."""
    script = launcher.script(
        "secret = os.read(int(os.environ['CYDIST_SECRET_FD'].split(':')[0]), 100)",
        "print('secret', secret.hex(), flush=True)",
        "pause()",
    )
    process = launcher.start("-n", "2", script)
    seen = launcher.read_until(process, lambda seen: seen.count(b"\n") == 2)
    shown = {bytes.fromhex(text.decode()) for text in re.findall(rb"secret (\w+)", seen)}
    assert [len(secret) for secret in shown] == [32]
    (secret,) = shown
    pids = launcher.alive()
    assert len(pids) == 5  # with the launcher's three
    for pid in pids:
        sight = (
            Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        assert secret not in sight
        assert secret.hex().encode() not in sight
