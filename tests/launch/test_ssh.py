"""cydistrun --hosts: launchers that ssh starts. Here a script stands for ssh, and this machine for
the hosts; test_sshd.py has real ones."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from extra_values import more
from launched_hosts import SUM, ends, first_failures, said, without_notices
from transport_ranks import free_port

from cydist.errors import RendezvousError
from cydist.launch import ssh
from cydist.launch.options import DEFAULT_PORT, LaunchOptions, ListedHost, listed_hosts
from cydist.launch.output import Tail
from cydist.launch.ssh import is_local, master_address, ssh_command

if TYPE_CHECKING:
    from conftest import Launcher

# What ssh does, as far as cydistrun knows: it runs a command in a shell with an environment of its
# own, whose start writes text. `silent` is a host that does not answer, and `off` one that refuses.
SSH = """#!/bin/sh
while case "$1" in -*) true ;; *) false ;; esac; do shift; done
host=$1; shift
case $host in
  off) echo "ssh: connect to host off port 22: Connection refused" >&2; exit 255 ;;
  silent) exec cat ;;
esac
echo "Welcome to $host"
echo "Warning: a banner of $host" >&2
exec env -i PATH="$PATH" HOME="$HOME" LAUNCH_TEST="$LAUNCH_TEST" HOST="$host" \\
  SSH_CONNECTION="127.0.0.1 4711 127.0.0.1 22" sh -c "$*"
"""


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script on the PATH, and none of this process's variables that would travel."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/ssh"
    program.write_text(SSH)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PET_MASTER_PORT", str(free_port()))
    for name in list(os.environ):
        if name.startswith("CYDIST_"):
            monkeypatch.delenv(name)


def test_one_command_starts_a_job(launcher: Launcher) -> None:
    """Every rank has its place, nothing comes from stdin, and text of ssh and shells is left
    out."""
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE MASTER_ADDR"
    script = launcher.script(
        *SUM,
        f"print(*[os.environ[name] for name in {names.split()}], os.environ.get('HOST'),",
        "      repr(sys.stdin.read()), os.getcwd() == os.path.dirname(__file__), x.tolist())",
        "dist.destroy_process_group()",
    )
    result = launcher.run("--hosts=a:1,localhost:2,user@b", "--nproc-per-node=1", script)
    assert (result.returncode, without_notices(result.stderr)) == (0, "")
    assert sorted(result.stdout.splitlines()) == [
        "[0] 0 0 4 1 0 3 127.0.0.1 a '' True [6.0, 10.0, 14.0]",
        "[1] 1 0 4 2 1 3 127.0.0.1 None '' True [6.0, 10.0, 14.0]",
        "[2] 2 1 4 2 1 3 127.0.0.1 None '' True [6.0, 10.0, 14.0]",
        "[3] 3 0 4 1 2 3 127.0.0.1 user@b '' True [6.0, 10.0, 14.0]",
    ]


def test_text_of_ssh_that_is_read_after_the_greeting_is_left_out(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It was written before, but a busy launcher may read stdout first."""
    (out, to_out), (err, to_err) = os.pipe(), os.pipe()
    remote: Any = SimpleNamespace(name="a", greeting=None, words=Tail(), out=out, err=err)
    later: Any = SimpleNamespace(name="b", greeting=None)
    options = LaunchOptions(("x",), hosts=listed_hosts("a:1,b:1", "1"))
    starter = ssh._Starter(options)
    starter._remotes = [remote, later]
    starter._watch(remote)
    os.write(to_err, b"Warning: a banner\n")
    os.write(to_out, ssh.GREETING + b"{}\n")
    os.close(to_out)
    os.close(to_err)
    starter._output.read(out)
    assert remote.greeting == {}
    starter._output.finish()
    assert "Warning: a banner" in remote.words.bytes().decode()
    assert capfd.readouterr().err == ""


def test_one_host_elsewhere(launcher: Launcher) -> None:
    """Is a job like that of cydistrun there."""
    script = launcher.script(*SUM, "print(x.tolist())", "dist.destroy_process_group()")
    result = launcher.run("--hosts=a:2", script)
    assert (result.returncode, without_notices(result.stderr)) == (0, "")
    assert sorted(result.stdout.splitlines()) == [f"[{rank}] [1.0, 3.0, 5.0]" for rank in range(2)]


def test_a_failure_is_told_once(launcher: Launcher) -> None:
    """With the name of the host, and its exit code; so is each restart."""
    script = launcher.script("if rank == 2: sys.exit(7)", "pause()")
    options = ("--hosts=a:2,b:1", "--max-restarts=1", "--restart-delay=0")
    result = launcher.run(*options, script)
    assert result.returncode == 7
    assert first_failures(result.stderr) == [2, 2]
    assert result.stderr.count("cydistrun on a: starting 3 ranks of 2 hosts again") == 1
    assert "cydistrun on a: ranks 0, 1 did not fail and had to end with it\n" in result.stderr
    assert launcher.settles() == 0


def test_survivors_go_on(launcher: Launcher) -> None:
    """With --keep-going the other ranks end by themselves."""
    script = launcher.script("if rank: sys.exit(7)", "print('went on')")
    result = launcher.run("--hosts=a:1,b:1", "--keep-going", script)
    assert (result.returncode, result.stdout) == (7, "[0] went on\n")


def test_the_secret_is_in_no_command_and_no_environment(launcher: Launcher) -> None:
    """A rank finds it in its pipe, and in no process's command line or environment."""
    script = launcher.script(
        "import glob",
        "from cydist.net import auth",
        "secret = bytes(auth.secret()).hex().encode()",
        "seen, ours = 0, 0",
        "for path in glob.glob('/proc/[0-9]*/cmdline') + glob.glob('/proc/[0-9]*/environ'):",
        "    try: text = open(path, 'rb').read()",
        "    except OSError: continue",
        "    seen += secret in text",
        "    ours += b'cydist.launch.remote' in text",
        "print(seen, ours > 1)",
    )
    result = launcher.run("--hosts=a:1,b:1", script)
    assert sorted(result.stdout.splitlines()) == ["[0] 0 True", "[1] 0 True"]


def test_variables_that_travel(launcher: Launcher, tmp_path: Path) -> None:
    """Those of cydist and of libraries that it knows, and those that are named; a secret file that
    was given here is not used there, nor one of another job."""
    names = ("CYDIST_TRANSPORT", "OMP_NUM_THREADS", "GIVEN", "LEFT", "CYDIST_SECRET_FILE")
    script = launcher.script(f"print(*[os.environ.get(name) for name in {names}])")
    env = {"CYDIST_TRANSPORT": "tcp", "OMP_NUM_THREADS": "3", "GIVEN": "x y", "LEFT": "left",
           "CYDIST_SECRET_FILE": str(tmp_path / "none")}  # fmt: skip
    result = launcher.run("--hosts=a:1,b:1", "--export=GIVEN", script, env=env)
    assert (result.returncode, without_notices(result.stderr)) == (0, "")
    assert sorted(result.stdout.splitlines()) == [f"[{r}] tcp 3 x y None None" for r in range(2)]


def test_a_host_that_cannot_be_reached(launcher: Launcher) -> None:
    """Is named, with ssh's own last line, and nothing starts elsewhere."""
    result = launcher.run("--hosts=a:1,off:1", launcher.script("print('started')"))
    assert (result.returncode, result.stdout) == (1, "")
    assert without_notices(result.stderr) == (
        "cydistrun: off cannot be reached with ssh, which may ask nothing (try: ssh off true): "
        "ssh: connect to host off port 22: Connection refused\n"
    )
    assert launcher.settles() == 0


def test_a_host_that_drops_packets(launcher: Launcher, tmp_path: Path) -> None:
    """ssh is told how long to try; the host is named then, and nothing starts elsewhere."""
    words = "ssh: connect to host deaf port 22: Connection timed out"
    (tmp_path / "bin/ssh").write_text(
        SSH.replace("host=$1", 'all="$all$1"; host=$1')
        .replace("do shift", 'do all="$all$1 "; shift')
        .replace("  silent)", "  deaf)\n    case $all in *-oConnectTimeout=30*)\n"
                 f"      echo '{words}' >&2; exit 255 ;; esac; exec cat ;;\n  silent)")
    )  # fmt: skip
    result = launcher.run("--hosts=a:1,deaf:1", launcher.script("print('started')"))
    assert (result.returncode, result.stdout) == (1, "")
    assert "cydistrun: deaf cannot be reached with ssh" in result.stderr
    assert words in result.stderr


def test_a_free_port(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """--master-port 0 is a free port of the first host, which all ranks are told."""
    monkeypatch.delenv("PET_MASTER_PORT")
    script = launcher.script(*SUM, "print(os.environ['MASTER_PORT'])",
                             "dist.destroy_process_group()")  # fmt: skip
    with socket.socket() as default:  # the port of several hosts without the option
        default.bind(("", DEFAULT_PORT))
        result = launcher.run("--hosts=a:1,b:1", "--master-port=0", script)
    assert (result.returncode, without_notices(result.stderr)) == (0, "")
    found = {line.partition(" ")[2] for line in result.stdout.splitlines()}
    assert len(found) == 1
    assert found.isdisjoint({"0", str(DEFAULT_PORT)})


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        ("mv cydist away", "No module named"),
        pytest.param("rm python", "No such file", marks=pytest.mark.more),
    ],
)
def test_a_host_without_cydist(launcher: Launcher, tmp_path: Path, setup: str, words: str) -> None:
    """Is named, with the Python and the last line from there."""
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    (tmp_path / "cydist").symlink_to(Path(__file__).parents[2] / "cydist")
    ssh = tmp_path / "bin/ssh"
    ssh.write_text(SSH.replace("exec env -i", f"(cd {tmp_path} && {setup}); exec env -i"))
    script = launcher.script("print('started')")
    command = (str(link), "-m", "cydist.run", "--hosts=a:1", script)
    process = launcher.start_command(*command, env={"PYTHONPATH": str(tmp_path)})
    ((code, out, err),) = ends(process)
    assert (code, out) == (1, "")
    assert f"cydistrun: a cannot start cydist with {link} in {tmp_path}: " in err
    assert words in err


def test_no_module_comes_from_the_directory(launcher: Launcher, tmp_path: Path) -> None:
    """Others may write there, as in /tmp. Neither launcher imports what they left."""
    (tmp_path / "argparse.py").write_text(f"open({str(tmp_path / 'seen')!r}, 'w')\n")
    script = launcher.script("print('started')")
    command = (sys.executable, "-P", "-m", "cydist.run", "--hosts=a:1,localhost:1", script)
    source = str(Path(__file__).parents[2])
    ((code, out, err),) = ends(launcher.start_command(*command, env={"PYTHONPATH": source}))
    assert (code, without_notices(err)) == (0, "")
    assert sorted(out.splitlines()) == ["[0] started", "[1] started"]
    assert not (tmp_path / "seen").exists()


def test_what_a_host_says_controls_no_terminal(launcher: Launcher, tmp_path: Path) -> None:
    """Of the last line before the greeting, which cydistrun repeats."""
    ssh = tmp_path / "bin/ssh"
    ssh.write_text("#!/bin/sh\nprintf 'no\\033]0;title\\007 entry\\r\\n' >&2\nexit 255\n")
    result = launcher.run("--hosts=a:1", launcher.script("print('started')"))
    assert result.returncode == 1
    assert result.stderr.endswith(": no?]0;title? entry\n")


def test_an_error_of_one_host_ends_all(launcher: Launcher, tmp_path: Path) -> None:
    """An option that one host refuses ends the wait of the others for it, with its exit code."""
    script = launcher.script("print('started')")
    ssh = tmp_path / "bin/ssh"
    ssh.write_text(SSH.replace("env -i", "env -i CUDA_VISIBLE_DEVICES="))
    result = launcher.run("--hosts=a:1,b:gpu", script)
    assert (result.returncode, result.stdout) == (2, "")
    assert "cydistrun on b: --nproc-per-node gpu: this host shows no CUDA device" in result.stderr
    assert launcher.settles() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, *more(signal.SIGTERM)])
def test_a_signal_ends_all_hosts(launcher: Launcher, number: signal.Signals) -> None:
    """It is passed on to the ranks of all hosts, which may end in their own way."""
    script = launcher.script(
        "def ended(*_):",
        "    print('told', flush=True)",
        "    sys.exit(0)",
        f"signal.signal({int(number)}, ended)",
        "ready()",
        "pause()",
    )
    process = launcher.start("--hosts=a:1,b:1", script)
    launcher.wait_ready(process, 2)
    process.send_signal(number)
    ((code, out, err),) = ends(process)
    assert code == 128 + number
    assert sorted(out.splitlines()) == ["[0] told", "[1] told"]
    # A host may hear the other's verdict before its own signal.
    assert f"{number.name}: ending all ranks" in err
    assert launcher.settles() == 0


def test_a_second_signal_kills(launcher: Launcher) -> None:
    """Ranks that ignore the first SIGINT do not outlive the second."""
    script = launcher.script("signal.signal(2, lambda *_: ready())", "ready()", "pause()")
    process = launcher.start("--hosts=a:1,b:1", "--shutdown-timeout=inf", script)
    launcher.wait_ready(process, 2)
    process.send_signal(signal.SIGINT)
    launcher.wait_ready(process, 2)
    process.send_signal(signal.SIGINT)
    assert ends(process)[0][0] == 130
    assert launcher.settles() == 0


def test_a_signal_ends_the_wait_for_ssh(launcher: Launcher) -> None:
    """What is waited for is said, and nothing starts."""
    process = launcher.start("--hosts=a:1,silent:1", launcher.script("print('started')"))
    words = said(process, "To see what ssh waits for, run: ssh silent true")
    assert re.search(r"this command has waited \d+ s for ssh to silent[.] ", words)
    process.terminate()
    assert ends(process)[0][:2] == (143, "")
    assert launcher.settles() == 0


@pytest.mark.parametrize("which", ["outer", *more("inner")])
def test_the_death_of_the_command_ends_all(launcher: Launcher, which: str) -> None:
    """If the command that the user started is killed, nothing of the job lives on, on any host."""
    script = launcher.script("ready()", "pause()")
    process = launcher.start("--hosts=a:1,b:1", script)
    launcher.wait_ready(process, 2)
    if which == "outer":
        process.kill()
    else:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        os.kill(int(children), signal.SIGKILL)
    ends(process)
    assert launcher.settles() == 0


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_the_death_of_a_launcher_ends_all(launcher: Launcher) -> None:
    """It is named, and the others end."""
    script = launcher.script("os.write(1, b'ready %d\\n' % os.getppid())", "pause()")
    process = launcher.start("--hosts=a:1,b:1", script)
    inner = launcher.wait_ready(process, 2)
    guards = map(parent_of, inner)
    os.kill(max(map(parent_of, guards)), signal.SIGKILL)
    ((code, _, err),) = ends(process)
    assert code == 1
    assert "was lost, or its launcher killed" in err
    assert launcher.settles() == 0


def test_a_reader_that_goes_ends_nothing_else(launcher: Launcher) -> None:
    """`| head` takes what it wants, and the job ends well."""
    script = launcher.script("for _ in range(10000): print('x' * 100)")
    command = f"{sys.executable} -m cydist.run --hosts=a:1 {script}; echo code $? >&2"
    process = launcher.start_shell(f"({command}) | head -n 1")
    ((code, out, err),) = ends(process)
    assert (code, out) == (0, f"[0] {'x' * 100}\n")
    assert without_notices(err) == "code 0\n"


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:2,b:3", (("a", "2"), ("b", "3"))),
        ("a, user@b:gpu", (("a", "7"), ("user@b", "gpu"))),
        ("[fd77::1],root@[fd77::2]:2", (("[fd77::1]", "7"), ("root@[fd77::2]", "2"))),
    ],
)
def test_lists(text: str, hosts: tuple[tuple[str, str], ...]) -> None:
    """Names, users, brackets, and sizes."""
    assert listed_hosts(text, "7") == tuple(ListedHost(*each) for each in hosts)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a:2,a:1", "a is given twice"),
        ("a:2,,b", "'' is not HOST or HOST:N"),
        ("a:", "'a:' is not HOST or HOST:N"),
        ("-oProxyCommand=x:1", "is not HOST or HOST:N"),
        ("[-oProxyCommand=x]:1", "is not HOST or HOST:N"),
        ("user@[-oProxyCommand=x]:1", "is not HOST or HOST:N"),
        ("[]-oProxyCommand=x", "is not HOST or HOST:N"),
        ("user@:2", "is not HOST or HOST:N"),
        ("fd77::1", "write an IPv6 address in brackets"),
        ("a:22:2", "a port into ~/.ssh/config"),
    ],
)
def test_no_lists(text: str, words: str) -> None:
    """Each says what is wrong."""
    with pytest.raises(ValueError, match=words):
        listed_hosts(text, "7")


def test_which_host_is_this_one() -> None:
    """By name, or by an address of it, but not with a user, for whom ssh asks."""
    here = ("localhost", socket.gethostname(), "127.0.0.1")
    assert all(map(is_local, here))
    assert not any(map(is_local, ("user@localhost", "192.0.2.1", "[2001:db8::1]", "elsewhere")))


LOCAL = (True, "")


@pytest.mark.parametrize(
    ("hosts", "address"),
    [
        ([LOCAL], "127.0.0.1"),
        ([(False, "10.0.0.9 5 10.0.0.1 22")], "127.0.0.1"),
        ([(False, "10.0.0.9 5 10.0.0.1 22"), (False, "10.0.0.9 6 10.0.0.2 22")], "10.0.0.1"),
        ([LOCAL, (False, "10.0.0.9 6 10.0.0.2 22")], "10.0.0.9"),
        ([(False, "10.0.0.9 6 10.0.0.1 22"), LOCAL], "10.0.0.1"),
        ([(False, "::1 6 ::1 22"), (False, "127.0.0.1 6 127.0.0.1 22")], "::1"),
        ([(False, "127.0.0.1 6 127.0.0.1 22"), (False, "10.0.0.9 6 10.0.0.2 22")], None),
        ([LOCAL, (False, "fe80::1%eth0 6 fe80::2%eth0 22")], None),
        ([LOCAL, (False, "")], None),
        ([LOCAL, (False, "UNKNOWN 65535 UNKNOWN 65535")], None),
    ],
)
def test_the_address_of_the_first_host(hosts: list[tuple[bool, str]], address: str | None) -> None:
    """Is that at which ssh reached it, or from which ssh came; one that means another host on
    another host is refused."""
    if address is None:
        with pytest.raises(RendezvousError, match="give its address with --master-addr"):
            master_address(hosts)
    else:
        assert master_address(hosts) == address


@pytest.mark.parametrize(
    ("timeout", "interval"), [("15", 5), ("3", 2), ("1e12", 250_000_000), ("inf", 0)]
)
def test_ssh_gives_a_host_up_with_the_launchers(
    monkeypatch: pytest.MonkeyPatch, timeout: str, interval: int
) -> None:
    """At the fourth question in vain, 5 s after CYDIST_PEER_TIMEOUT. It asks none with `inf`."""
    monkeypatch.setenv("CYDIST_PEER_TIMEOUT", timeout)
    assert f"-oServerAliveInterval={interval}" in ssh_command()
    assert "-oServerAliveCountMax=3" in ssh_command()
