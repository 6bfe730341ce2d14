"""Jobs over several hosts: their launchers meet, start together and end together.

All launchers are on this machine. What they know of each other they know from their connections.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from extra_values import more
from launched_hosts import (
    CAUSE_ENDS_LAST,
    DEADLINE,
    FIFOS,
    SUM,
    Ended,
    HostLaunchers,
    ends,
    said,
    secret_file,
    without_notices,
)
from network_hosts import network_of, require_hosts
from transport_ranks import free_port

from cydist.errors import RendezvousError
from cydist.launch import hosts
from cydist.launch.options import LaunchOptions

if TYPE_CHECKING:
    from conftest import Launcher

HERE = socket.gethostname()


@pytest.fixture
def start(launcher: Launcher) -> HostLaunchers:
    """The launchers of one job."""
    return HostLaunchers(launcher)


def listens(launcher: Launcher, process: subprocess.Popen[bytes]) -> None:
    """Wait until host 0's launcher, started like this, listens."""
    (port,) = re.findall(r"--master-port=(\d+)", " ".join(map(str, process.args)))

    def reached() -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", int(port)), DEADLINE).close()
            return True
        return False

    launcher.until(reached)


def test_uneven_hosts(launcher: Launcher, start: HostLaunchers) -> None:
    """Hosts with 1, 2 and 1 ranks: every rank has its place, and all make one job."""
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE"
    script = launcher.script(
        *SUM,
        f"print(*[os.environ[name] for name in {names.split()}], x.tolist())",
        "dist.destroy_process_group()",
    )
    found = ends(
        *(start(node, script, f"-n{size}", nodes=3) for node, size in enumerate((1, 2, 1)))
    )
    assert [(code, without_notices(err)) for code, _, err in found] == 3 * [(0, "")]
    assert sorted("".join(out for _, out, _ in found).splitlines()) == [
        "[0] 0 0 4 1 0 3 [6.0, 10.0, 14.0]",
        "[1] 1 0 4 2 1 3 [6.0, 10.0, 14.0]",
        "[2] 2 1 4 2 1 3 [6.0, 10.0, 14.0]",
        "[3] 3 0 4 1 2 3 [6.0, 10.0, 14.0]",
    ]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_ends_all_hosts(launcher: Launcher, start: HostLaunchers, failing: int) -> None:
    """Ranks of another host that compute end, too. Every launcher names the rank, its host and its
    last words, and has its exit code."""
    script = launcher.script(
        f"if rank == {failing}:",
        "    print('last words', file=sys.stderr)",
        "    sys.exit(7)",
        "pause()",
    )
    for code, _, err in ends(start(0, script), start(1, script)):
        assert code == 7
        assert re.search(
            rf"cydistrun: rank {failing} \(local rank 0, pid \d+, host {HERE}\) failed first: exit "
            rf"code 7\ncydistrun: the last words of rank {failing}:\n    last words\n",
            err,
        )
        assert err.count("failed first") == 1
    assert launcher.settles() == 0


def test_a_consequence_on_host_0_is_not_the_first(launcher: Launcher, start: HostLaunchers) -> None:
    """A rank of host 0 that reports the death of another host's rank, and ends sooner, is not
    named."""
    for name in FIFOS:
        os.mkfifo(launcher.directory / name)
    script = launcher.script(*CAUSE_ENDS_LAST)
    for code, _, err in ends(start(0, script), start(1, script)):
        assert code == 1
        assert "cydistrun: rank 1 (local rank 0" in err
        assert "    ValueError: the cause\n" in err
        assert err.count("failed first") == 1


def test_a_failure_that_only_blames_others_ends_the_job(
    launcher: Launcher, start: HostLaunchers
) -> None:
    """Where no rank fails by itself, the one that blames another is named after all."""
    script = launcher.script("if rank: raise RuntimeError('PeerFailedError: a guess')", "pause()")
    for code, _, err in ends(start(0, script), start(1, script)):
        assert code == 1
        assert "cydistrun: rank 1 (local rank 0" in err


def test_restarts_are_of_all_hosts(launcher: Launcher, start: HostLaunchers) -> None:
    """After a failure on one host the ranks of all start again as one job; one that had ended well
    does, too."""
    script = launcher.script(
        *SUM,
        "count = os.environ['CYDIST_RESTART_COUNT']",
        "print(count, x.tolist(), flush=True)",
        "dist.destroy_process_group()",
        "sys.exit(5 if count == str(rank - 1) else 0)",
    )
    options = ("--max-restarts=3",)
    found = ends(start(0, script, "-n2", *options), start(1, script, *options))
    assert [code for code, _, _ in found] == [0, 0]
    for _, _, err in found:
        again = re.findall(r"starting 3 ranks of 2 hosts again \(restart (\d) of 3\)", err)
        assert again == ["1", "2"]
        assert re.findall(r"rank (\d) \(.*failed first", err) == ["1", "2"]
    out = "".join(out for _, out, _ in found)
    assert sorted(out.splitlines()) == [
        f"[{rank}] {count} [3.0, 6.0, 9.0]" for rank in range(3) for count in range(3)
    ]


def test_restarts_end(launcher: Launcher, start: HostLaunchers) -> None:
    """After the last one the job has failed, on every host."""
    script = launcher.script("sys.exit(6 * rank)")
    for code, _, err in ends(*(start(node, script, "--max-restarts=1") for node in range(2))):
        assert code == 6
        assert err.count("rank 1 (local rank 0") == 2


@pytest.mark.parametrize("killed", [0, 1])
def test_a_lost_launcher_ends_the_job(
    launcher: Launcher, start: HostLaunchers, killed: int
) -> None:
    """Where a host's launcher is killed, that of the other says so, and ends its ranks."""
    script = launcher.script("ready()", "pause()")
    hosts = [start(node, script, "--max-restarts=1") for node in range(2)]
    for host in hosts:
        launcher.wait_ready(host, 1)
    hosts[killed].kill()
    ((code, _, err),) = ends(hosts[1 - killed])
    assert code == 1
    assert re.search(rf"cydistrun: host {killed}.* was lost, or its launcher killed", err)
    assert f"rank {1 - killed} did not fail and had to end with it" in err
    assert launcher.settles() == 0


@pytest.mark.parametrize("told", [1, *more(0)])
def test_a_signal_ends_all_hosts(launcher: Launcher, start: HostLaunchers, told: int) -> None:
    """A launcher that is told to end ends the job, and the other says which it was."""
    script = launcher.script("ready()", "pause()")
    hosts = [start(node, script, "--max-restarts=1") for node in range(2)]
    for host in hosts:
        launcher.wait_ready(host, 1)
    hosts[told].terminate()
    found = ends(*hosts)
    assert [code for code, _, _ in found] == [143, 143]
    assert f"host {told} ({HERE}) was told to end by SIGTERM" in found[1 - told][2]


def test_ranks_of_all_hosts_get_the_signal(launcher: Launcher, start: HostLaunchers) -> None:
    """Ctrl-C at one launcher is SIGINT for the ranks of the others too. The first Ctrl-C at another
    one is the same, and its second one kills."""
    script = launcher.script("signal.signal(2, lambda *_: ready())", "ready()", "pause()")
    hosts = [start(node, script, "--shutdown-timeout=inf") for node in range(2)]
    for host in hosts:
        launcher.wait_ready(host, 1)
    hosts[0].send_signal(signal.SIGINT)
    for host in hosts:
        launcher.wait_ready(host, 1)
    hosts[1].send_signal(signal.SIGINT)
    hosts[0].send_signal(signal.SIGINT)
    assert ends(hosts[0])[0][0] == 130
    assert hosts[1].poll() is None
    hosts[1].send_signal(signal.SIGINT)
    assert ends(hosts[1])[0][0] == 130


@pytest.mark.parametrize("node", [0, *more(1)])
def test_a_signal_ends_the_wait_for_hosts(
    launcher: Launcher, start: HostLaunchers, node: int
) -> None:
    """A launcher that waits for others ends when told, and starts nothing."""
    process = start(node, launcher.script("print('started')"))
    if node:
        said(process, "has waited")
    else:
        listens(launcher, process)
    process.terminate()
    assert ends(process)[0][:2] == (143, "")


def test_a_node_rank_given_twice(launcher: Launcher, start: HostLaunchers) -> None:
    """Both sides are told, at once. The launcher that came first stays, and the job starts when the
    right one has come."""
    script = launcher.script("pass")
    hosts = [start(node, script, nodes=3) for node in range(2)]
    words = f"--node-rank 1 was given twice: on {HERE}, and on {HERE}, which was refused"
    second = start(1, script, nodes=3)
    # Either of the two may have come first.
    assert words in said(hosts[0], "given twice")
    hosts.append(start(2, script, nodes=3))
    refused, *others = sorted(ends(*hosts, second), key=lambda each: -each[0])
    assert (refused[0], [code for code, _, _ in others]) == (1, [0, 0, 0])
    assert words in refused[2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--max-restarts=2",), f"--max-restarts is 2 on {HERE} and 0 on {HERE} (host 0)"),
        pytest.param(
            ("--keep-going",),
            f"--keep-going is True on {HERE} and False on {HERE} (host 0)",
            marks=pytest.mark.more,
        ),
    ],
)
def test_options_that_differ(
    launcher: Launcher, start: HostLaunchers, options: tuple[str, ...], words: str
) -> None:
    """What must be equal on all hosts is compared before anything starts."""
    script = launcher.script("print('started')")
    host, other = start(0, script), start(1, script, *options)
    assert words in said(host, "give the same")
    ((code, out, err),) = ends(other)
    assert (code, out) == (1, "")
    assert words in err


def test_a_forgotten_node_rank(launcher: Launcher, start: HostLaunchers) -> None:
    """Two launchers that both are host 0: the second says what to give."""
    script = launcher.script("pass")
    listens(launcher, start(0, script))
    ((code, _, err),) = ends(start(None, script))
    assert code == 1
    assert "in use by another process" in err
    assert "This launcher is host 0, which listens at --master-addr and --master-port" in err
    assert "on other hosts, give --node-rank" in err


def test_what_is_missing_is_said_on_both_sides(launcher: Launcher, start: HostLaunchers) -> None:
    """Host 0's launcher says which hosts have not come and whom it refused, and tells those that
    have. One with another secret ends at once, and says why."""
    script = launcher.script("print('started')")
    early = start(1, script, nodes=3)
    words = said(early, "has waited")
    waited = rf"cydistrun: host 1 \({re.escape(HERE)}\) has waited \d+ s for host 0's launcher at "
    assert re.search(waited + "127[.]0[.]0[.]1:", words)
    assert "Connection refused: 127.0.0.1 is this host itself, and no process listens" in words
    host = start(0, script, nodes=3)
    outsider = start(2, script, nodes=3, key="other")
    ((code, out, err),) = ends(outsider)
    assert (code, out) == (1, "")
    assert "do not share one secret" in err
    for each in (host, early):
        line = said(each, "host 0 (")
        assert "host 2 has not come, 2 of 3 hosts are here. Refused: " in line
        assert "do not share one secret" in line


SURVIVORS = (
    *SUM,
    "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)",
    "try:",
    "    while True: dist.all_reduce(x)",
    "except dist.DistError:",
    "    dist.shrink_group()",
    "x = np.ones(1)",
    "dist.all_reduce(x)",
    "print('survived', x.tolist(), flush=True)",
    "dist.destroy_process_group()",
)


@pytest.mark.parametrize("sizes", [(3,), (1, 2), *more((2, 1))], ids=str)
def test_survivors_go_on(launcher: Launcher, start: HostLaunchers, sizes: tuple[int, ...]) -> None:
    """With --keep-going a dead rank ends no other, on any host, and is named at the end. The exit
    code is that of the dead rank."""
    script = launcher.script(*SURVIVORS)
    if len(sizes) == 1:
        found = ends(launcher.start("-n3", "--keep-going", script))
    else:
        found = ends(
            *(start(node, script, f"-n{size}", "--keep-going") for node, size in enumerate(sizes))
        )
    assert [code for code, _, _ in found] == len(sizes) * [137]
    out = "".join(out for _, out, _ in found)
    assert sorted(out.splitlines()) == ["[0] survived [2.0]", "[2] survived [2.0]"]
    for _, _, err in found:
        assert "rank 1 (local rank" in err
        assert "failed first: killed by SIGKILL (9)" in err
    assert "cydistrun: rank 1 killed by SIGKILL (9); the others go on\n" in "".join(
        err for _, _, err in found
    )


@pytest.mark.parametrize("killed", [0, *more(1)])
def test_keep_going_without_a_launcher(
    launcher: Launcher, start: HostLaunchers, killed: int
) -> None:
    """With --keep-going the loss of a host's launcher is said, and ends no rank of the other."""
    script = launcher.script("ready()", "sys.stdin.readline()", "print('went on')")
    hosts = [start(node, script, "--keep-going", stdin=subprocess.PIPE) for node in range(2)]
    for host in hosts:
        launcher.wait_ready(host, 1)
    hosts[killed].kill()
    said(hosts[1 - killed], "was lost, or its launcher killed")
    out, _ = hosts[1 - killed].communicate(b"\n", timeout=DEADLINE)
    assert (hosts[1 - killed].returncode, out) == (1, b"[%d] went on\n" % (1 - killed))


def test_the_secret_stays_in_its_file(launcher: Launcher, start: HostLaunchers) -> None:
    """Ranks of several hosts find no pipe with a secret, and the address and port that the user
    gave."""
    script = launcher.script(
        "print(*[os.environ[name] for name in ('MASTER_ADDR', 'MASTER_PORT')],",
        "      *[name in os.environ for name in ('CYDIST_SECRET_FD', 'CYDIST_STORE_PORT')])",
    )
    hosts = [start(node, script) for node in range(2)]
    (port,) = re.findall(r"--master-port=(\d+)", " ".join(map(str, hosts[0].args)))
    found = ends(*hosts)
    assert [out for _, out, _ in found] == [
        f"[{rank}] 127.0.0.1 {port} False False\n" for rank in range(2)
    ]


def test_a_shared_home(launcher: Launcher, start: HostLaunchers, tmp_path: Path) -> None:
    """Without CYDIST_SECRET_FILE the hosts use their user's own secret, which a home that they
    share holds; the first launcher makes it."""
    script = launcher.script(*SUM, "print(x.tolist())", "dist.destroy_process_group()")
    home = {"XDG_STATE_HOME": str(tmp_path / "home")}
    found = ends(*(start(node, script, key="", env=home) for node in range(2)))
    assert [(code, out) for code, out, _ in found] == [
        (0, f"[{rank}] [1.0, 3.0, 5.0]\n") for rank in range(2)
    ]


def test_homes_that_are_not_shared(
    launcher: Launcher, start: HostLaunchers, tmp_path: Path
) -> None:
    """Both sides are told that their secrets differ, and what to do."""
    script = launcher.script("print('started')")
    host, other = (
        start(node, script, key="", env={"XDG_STATE_HOME": str(tmp_path / f"home{node}")})
        for node in range(2)
    )
    ((code, out, err),) = ends(other)
    assert (code, out) == (1, "")
    for text in (err, said(host, "has waited")):
        assert "do not share one secret: give every host the same file, mode 0600" in text
        assert "CYDIST_SECRET_FILE" in text


def test_launchers_encrypt(launcher: Launcher, start: HostLaunchers) -> None:
    """With CYDIST_ENCRYPT=1 on all hosts the job works, launchers included; on one of two, both
    sides are told."""
    script = launcher.script("sys.exit(4 * rank)")
    on = {"CYDIST_ENCRYPT": "1"}
    found = ends(start(0, script, env=on), start(1, script, env=on))
    assert [code for code, _, _ in found] == [4, 4]
    host = start(0, script, env=on)
    ((code, _, err),) = ends(start(1, script))
    assert code == 1
    assert "CYDIST_ENCRYPT is 1 there and 0 here" in err
    assert "given twice" not in err
    # At once, and for as long as it waits.
    assert "has waited" not in said(host, "CYDIST_ENCRYPT is 0 there and 1 here")
    assert "CYDIST_ENCRYPT is 0 there and 1 here" in said(host, "has waited")


@pytest.mark.parametrize("insecure", [0, 1])
def test_a_launcher_without_authentication_is_refused(
    launcher: Launcher, start: HostLaunchers, insecure: int
) -> None:
    """CYDIST_INSECURE=1 on one host alone is told on all, at once and for as long as host 0 waits,
    also to a launcher that was taken."""
    script = launcher.script("print('started')")
    env = [{"CYDIST_INSECURE": f"{int(node == insecure)}"} for node in range(2)]
    host = start(0, script, nodes=3, env=env[0])
    early = start(1, script, nodes=3, env=env[0])
    words = f"CYDIST_INSECURE is {insecure} there and {1 - insecure} here: set it alike"
    ((code, out, err),) = ends(start(2, script, nodes=3, env=env[1]))
    assert (code, out) == (1, "")
    assert f"CYDIST_INSECURE is {1 - insecure} there and {insecure} here: set it alike" in err
    assert "has waited" not in said(host, words)
    for each in (host, early):
        assert words in said(each, "has waited")


def test_a_job_without_authentication_is_told_in_one_line(
    launcher: Launcher, start: HostLaunchers
) -> None:
    """Each launcher says so in a line of its own, and the ranks' warnings name the program."""
    script = launcher.script(*SUM, "dist.destroy_process_group()")
    on = {"CYDIST_INSECURE": "1"}
    for code, _, err in ends(start(0, script, env=on), start(1, script, env=on)):
        assert code == 0
        warned = [line for line in err.splitlines() if "CYDIST_INSECURE=1: anyone" in line]
        assert warned[0].startswith("cydistrun: CYDIST_INSECURE=1: anyone")
        assert f"{script}:" in warned[1]
        assert len(warned) == 2
        assert "hosts.py" not in err


def serve(launchers: hosts.Launchers) -> None:
    """Let a launcher handle what is there."""
    select.select([launchers], [], [], 0.05)
    launchers.serve()


def serve_to_the_end(launchers: hosts.Launchers) -> None:
    """Let it handle what comes, until it raises."""
    while True:
        serve(launchers)


@dataclass
class Start:
    """Host 0's launcher, in this process, and those of other hosts, which are told to end."""

    zero: hosts.HostZero
    said: list[str]
    others: HostLaunchers

    def serve(self) -> None:
        serve(self.zero)

    def refuse(self, script: str, *options: str, key: str = "key", **env: str) -> str:
        """Return the last words of a launcher of host 1 that is refused."""
        other = self.others(1, script, *options, key=key, env=env)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hosts, "REFUSED_SECONDS", 60.0)  # the launcher may need long to end
            while other.poll() is None:
                self.serve()
        patience = time.monotonic() + hosts.REFUSED_SECONDS
        self.zero._refused_until = dict.fromkeys(self.zero._refused_until, patience)
        ((code, _, err),) = ends(other)
        assert code == 1
        return err


@pytest.fixture
def impatient(
    launcher: Launcher, start: HostLaunchers, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Start]:
    """A start of two hosts, whose patience after a refused launcher is short."""
    monkeypatch.setattr(hosts, "REFUSED_SECONDS", 0.5)
    options = LaunchOptions(("x",), nodes=2, master_port=start.port, run_id="none")
    key = bytes.fromhex(secret_file(launcher.directory / "key").read_text())
    told: list[str] = []

    def say(text: str) -> None:
        told.extend([text] if without_notices(text) else [])

    with contextlib.closing(hosts.HostZero(options, say, key)) as zero:
        yield Start(zero, told, start)


@pytest.fixture
def stopped_zero(
    impatient: Start, monkeypatch: pytest.MonkeyPatch
) -> Callable[[bool], contextlib.closing[hosts.Launchers]]:
    """Host 1's launcher, in this process, once the job runs; host 0's reads nothing any more."""
    monkeypatch.setenv("CYDIST_PEER_TIMEOUT", "2")
    monkeypatch.setattr(hosts, "_LATER_SECONDS", 0.0)

    def running(keep_going: bool) -> contextlib.closing[hosts.Launchers]:
        zero = impatient.zero
        zero._options = zero._options._replace(keep_going=keep_going)
        options = LaunchOptions(
            ("x",), nodes=2, node_rank=1, master_addr="127.0.0.1",
            master_port=impatient.others.port, run_id="none", keep_going=keep_going,
        )  # fmt: skip
        key = bytes.fromhex((impatient.others.launcher.directory / "key").read_text())
        one = hosts.other_launchers(options, lambda text: None, key)
        while one.started < 0:
            impatient.serve()
            serve(one)
        return contextlib.closing(one)

    return running


FAILURE = {"rank": 1, "code": 1, "text": "rank 1 failed\n", "secondary": False, "ago": 0.0}


def test_a_launcher_that_is_stopped_is_given_up(
    stopped_zero: Callable[[bool], contextlib.closing[hosts.Launchers]],
) -> None:
    """Host 0's launcher does not answer the report of a failure, though its host is up."""
    with stopped_zero(False) as one:
        one.tell("failed", **FAILURE)
        while one.verdict is None:
            assert one.deadline is not None
            serve(one)
        assert one.verdict.text == (
            "cydistrun: host 0 was lost, or its launcher killed: its launcher does not answer the "
            "report of a failure for 2 s, and may be stopped\n"
        )


@pytest.mark.parametrize(("keep_going", "kind"), [(True, "failed"), (False, "done")])
def test_a_launcher_that_owes_no_answer_is_waited_for(
    stopped_zero: Callable[[bool], contextlib.closing[hosts.Launchers]],
    keep_going: bool,
    kind: str,
) -> None:
    """Ranks of host 0 may still run, if this host's ended well or are not to be ended."""
    with stopped_zero(keep_going) as one:
        one.tell(kind, **(FAILURE if kind == "failed" else {}))
        assert one.deadline is None


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (0, "timeout: host 1 has not come, 1 of 2 hosts is here"),
        (1, r"timeout: host 0's launcher at 127\.0\.0\.1:\d+: .*Connection refused"),
    ],
)
def test_no_launcher_waits_for_ever(
    monkeypatch: pytest.MonkeyPatch, secret: bytes, node: int, words: str
) -> None:
    """When its time is up, which is that of a group by default, it says what was missing."""
    assert timedelta(minutes=30) == hosts.DEFAULT_TIMEOUT
    monkeypatch.setattr(hosts, "DEFAULT_TIMEOUT", timedelta(seconds=0.3))
    options = LaunchOptions(
        ("x",), nodes=2, node_rank=node, master_addr="127.0.0.1", master_port=free_port(),
        run_id="none",
    )  # fmt: skip
    launchers = hosts.other_launchers(options, lambda text: None, secret)
    with contextlib.closing(launchers), pytest.raises(RendezvousError, match=words):
        serve_to_the_end(launchers)


@pytest.mark.parametrize(
    ("options", "env", "words"),
    [
        (("--keep-going",), {}, f"--keep-going is True on {HERE} and False on {HERE} (host 0)"),
        ((), {"CYDIST_ENCRYPT": "1"}, "CYDIST_ENCRYPT is 1 there and 0 here"),
    ],
    ids=["option", "setting"],
)
def test_a_refused_launcher_ends_the_start(
    launcher: Launcher, impatient: Start, options: tuple[str, ...], env: dict[str, str], words: str
) -> None:
    """If none comes in its place for a while. What was refused is said at once, and at the end."""
    impatient.refuse(launcher.script("pass"), *options, **env)
    assert words in impatient.said[0]
    with pytest.raises(RendezvousError, match=r"none has come in its place for 0\.5 s") as ended:
        serve_to_the_end(impatient.zero)
    assert words in str(ended.value)


def test_a_launcher_in_place_of_a_refused_one_lets_the_start_go_on(
    launcher: Launcher, impatient: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host 0 waits for a third host then, as if none had been refused."""
    monkeypatch.setattr(hosts, "REFUSED_SECONDS", 60.0)
    impatient.zero._all.add(2)
    script = launcher.script("pass")
    impatient.refuse(script, "--keep-going")
    right = impatient.others(1, script)
    while 1 not in impatient.zero._names:
        impatient.serve()
    impatient.zero._meet(time.monotonic() + 2 * hosts.REFUSED_SECONDS)
    assert impatient.zero.started < 0
    right.kill()


def test_an_unauthenticated_launcher_ends_no_start(launcher: Launcher, impatient: Start) -> None:
    """One with another secret is told of at once, whatever its settings are, and the right one can
    still come."""
    script = launcher.script("pass")
    words = "do not share one secret"
    assert words in impatient.refuse(script, key="other")
    assert words in impatient.said[0]
    impatient.refuse(script, key="other", CYDIST_NAT="1")
    assert "CYDIST_NAT is 1 there and 0 here" in impatient.said[1]
    patience = time.monotonic() + 2 * hosts.REFUSED_SECONDS
    while time.monotonic() < patience:
        impatient.serve()
    right = impatient.others(1, script)
    while impatient.zero.started < 0:
        impatient.serve()
    assert impatient.zero.sizes == (1, 1)
    right.kill()


def test_a_secret_that_others_can_read(
    launcher: Launcher, start: HostLaunchers, tmp_path: Path
) -> None:
    """Is refused by the launcher, before anything starts."""
    secret_file(tmp_path / "key").chmod(0o644)
    ((code, out, err),) = ends(start(0, launcher.script("print('started')")))
    assert (code, out) == (1, "")
    assert "chmod 600" in err


@pytest.mark.parametrize(("timeout", "limit_ms"), [("3", 8000), ("1e9", (1 << 31) - 1), ("inf", 0)])
def test_launchers_give_a_host_up_after_their_ranks(
    launcher: Launcher,
    impatient: Start,
    monkeypatch: pytest.MonkeyPatch,
    timeout: str,
    limit_ms: int,
) -> None:
    """By 5 s, so that the ranks' errors come first. With `inf` neither ever does."""
    monkeypatch.setenv("CYDIST_PEER_TIMEOUT", timeout)
    other = impatient.others(1, launcher.script("pause()"))
    while impatient.zero.started < 0:
        impatient.serve()
    (connection,) = impatient.zero._connections
    found = connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    probes = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert (found, bool(probes)) == (limit_ms, limit_ms > 0)
    other.kill()


@pytest.mark.parametrize("node", [0, *more(1)])
def test_a_peer_timeout_that_is_none(launcher: Launcher, start: HostLaunchers, node: int) -> None:
    """Is told of before any other host is waited for."""
    process = start(node, launcher.script("pass"), env={"CYDIST_PEER_TIMEOUT": "1"})
    ((code, _, err),) = ends(process)
    words = "cydistrun: CYDIST_PEER_TIMEOUT='1' is not 2 or more seconds, nor inf\n"
    assert (code, without_notices(err)) == (1, words)


@dataclass
class CutOff:
    """Starts a job with a rank on each of two hosts, and cuts the two off from each other."""

    launcher: Launcher
    directory: Path

    def ends(self, script: str, timeout: int) -> list[Ended]:
        """Return how the launchers ended, of which each had a CYDIST_PEER_TIMEOUT."""
        key = secret_file(self.directory / "key")
        command = (sys.executable, "-m", "cydist.run", "--nnodes=2")
        with network_of(2, self.directory / "network") as (_, made):
            hosts = [
                self.launcher.start_command(
                    *host.enter("sh", "-c", 'cd "$0" && exec "$@"', str(self.directory), *command,
                                f"--master-addr={made[0].address}", f"--node-rank={host.number}",
                                script),
                    env={"CYDIST_SECRET_FILE": str(key), "CYDIST_PEER_TIMEOUT": str(timeout)},
                )
                for host in made
            ]  # fmt: skip
            for host in hosts:
                self.launcher.wait_ready(host, 1)
            made[0].link_down()
            return ends(*hosts)


@pytest.fixture
def cut_off(launcher: Launcher, tmp_path: Path) -> CutOff:
    require_hosts()
    return CutOff(launcher, tmp_path)


@pytest.mark.slow
def test_a_host_that_is_cut_off(launcher: Launcher, cut_off: CutOff) -> None:
    """Each of two launchers whose link goes down says that the other host was lost, and ends its
    ranks, though these compute."""
    found = cut_off.ends(launcher.script("ready()", "pause()"), timeout=2)
    for node, (code, _, err) in enumerate(found):
        assert code == 1
        assert re.search(rf"cydistrun: host {1 - node}.* was lost, or its launcher killed", err)
    assert launcher.settles() == 0


@pytest.mark.long
def test_ranks_name_a_host_before_their_launchers_end_them(
    launcher: Launcher, cut_off: CutOff
) -> None:
    """The ranks that wait for a lost host say so, however long CYDIST_PEER_TIMEOUT is."""
    script = launcher.script(*SUM, "ready()", "while True: dist.all_reduce(x)")
    for node, (code, _, err) in enumerate(cut_off.ends(script, timeout=20)):
        assert code == 1
        lost = f"host host{1 - node} with rank {1 - node} was lost"
        # In the last words of the rank that failed first here, or in its line after another host.
        place = rf"^(?: +|cydistrun: rank {node}: )"
        assert re.search(rf"(?m){place}cydist\.PeerFailedError: .*{lost}", err)
