"""The command line of cydistrun: what it accepts, resolves and refuses."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cydist.config import __version__
from cydist.launch.options import (
    REFUSED,
    REFUSED_FLAGS,
    REFUSED_OF_MPIRUN,
    LaunchOptions,
    parse,
    parser,
    which_streams,
)

SCRIPT = os.path.abspath(__file__)
CPUS = len(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def no_outside_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own environment has no say."""
    for name in list(os.environ):
        if name.startswith(("PET_", "CYDIST_", "TORCH", "CUDA_")):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {"local_size": 1, "nodes": 1, "master_addr": "127.0.0.1", "master_port": None}),
        ("--nproc-per-node 3", {"local_size": 3}),
        ("--nproc_per_node=3", {"local_size": 3}),
        ("--nproc=3", {"local_size": 3}),
        ("-n 3", {"local_size": 3}),
        ("-np 3", {"local_size": 3}),
        ("--np 3", {"local_size": 3}),
        ("--nproc-per-node cpu", {"local_size": CPUS}),
        ("--standalone --nproc-per-node=2", {"local_size": 2, "nodes": 1, "master_port": None}),
        ("--nnodes 1:1", {"nodes": 1}),
        ("--rdzv-backend=c10d --rdzv-endpoint=localhost:0", {"master_port": None}),
        ("--rdzv-backend=c10d --rdzv-endpoint=localhost:29400", {"master_port": None}),
        ("--standalone --rdzv-backend=etcd --rdzv-endpoint=h:1", {"master_addr": "127.0.0.1"}),
        ("--rdzv_endpoint=h:123", {"master_addr": "h", "master_port": 123}),
        ("--rdzv-endpoint=[::1]:123", {"master_addr": "::1", "master_port": 123}),
        ("--rdzv-endpoint=h", {"master_addr": "h", "master_port": None}),
        ("--master_addr h --master_port 1", {"master_addr": "h", "master_port": 1}),
        ("--master-addr [::1]", {"master_addr": "::1"}),
        ("--rdzv-id job7", {"run_id": "job7"}),
        ("--max-restarts 2 --restart-delay 0", {"max_restarts": 2, "restart_delay": 0.0}),
        ("--shutdown-timeout 1.5", {"grace": 1.5}),
        ("--role trainer", {"role": "trainer"}),
        ("--redirects 3", {"redirects": {0: 3}}),
        ("-n 2 -r 0:1,1:2", {"redirects": {0: 1, 1: 2}, "tee": {}}),
        ("-n 2 -t 1", {"tee": {0: 1, 1: 1}}),
        ("--log-dir d", {"log_dir": "d", "tee": {0: 3}}),
        ("--log-dir d -r 1", {"redirects": {0: 1}, "tee": {}}),
        ("-n 3 --local_ranks_filter 0,2", {"shown": frozenset({0, 2})}),
        ("--signals-to-handle SIGTERM,usr1", {"signals": (signal.SIGTERM, signal.SIGUSR1)}),
        ("--no-prefix --use_env", {"prefix": False}),
        ("--use-env=True -n 2", {"local_size": 2}),
        ("--event-log-handler null --nnodes=1:1", {"nodes": 1}),
        ("--monitor-interval 5 --start-method fork --local-addr x --run-path", {"is_script": True}),
    ],
)
def test_accepted(arguments: str, expected: dict[str, object]) -> None:
    """Each option means what it means to torchrun; both spellings are one."""
    options = parse([*arguments.split(), SCRIPT, "its", "own"])
    assert {name: getattr(options, name) for name in expected} == expected
    assert options.command == (SCRIPT, "its", "own")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--nproc-per-node xpu", "cydist has no backend for XPUs"),
        ("--nproc-per-node x", "'x' is not a number, cpu, gpu or auto"),
        ("-n 0", "must be at least 1, got 0"),
        ("--nnodes 2:x", "'2:x' is not a number"),
        ("--hosts a,b --nnodes 2", "--nnodes and --hosts exclude each other"),
        ("--hosts a,b --node-rank 1", "--node-rank and --hosts exclude each other"),
        ("--hosts a,b --standalone", "--standalone and --hosts exclude each other"),
        ("--hosts a,b --rdzv-endpoint h:1", "--rdzv-endpoint and --hosts exclude each other"),
        ("--hosts a:0,b", "--nproc-per-node must be at least 1, got 0"),
        ("--hosts a,a:2", "a is given twice"),
        ("--hosts a:2,node1:x", "'x' processes on node1: give a number, cpu, gpu or auto"),
        ("--nnodes 2 --master-addr h --master-port 0", "--master-port 0 means a free port, which"),
        ("--hosts a:2,b:1 --redirects 1:3", "there is no local rank 1"),
        ("--hosts a,b --export CYDIST_NO_SUCH", "--export: CYDIST_NO_SUCH is not set here"),
        ("--max-restarts 1 --keep-going", "--max-restarts and --keep-going exclude each other"),
        ("--nnodes two", "'two' is not a number"),
        ("--nnodes 0", "must be at least 1"),
        ("--nnodes 2 --standalone", "--standalone means one host"),
        ("--nnodes 2", "several hosts need --master-addr"),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint h", "start cydistrun on every host with"),
        ("--rdzv-backend etcd-v2", "etcd-v2 is not supported: there is no rendezvous service"),
        ("--rdzv-conf a=b", "--rdzv-conf is not supported: there is no rendezvous service"),
        ("--numa_binding node", "--numa-binding is not supported"),
        ("--virtual-local-rank", "--virtual-local-rank is not supported: ranks of one host"),
        ("--virtual_local_rank --standalone", "--virtual-local-rank is not supported"),
        ("--node-rank 1", "not in 0..0"),
        ("--master-port 70000", "not in 1..65535"),
        ("--max-restarts -1", "--max-restarts must not be negative"),
        ("--redirects 4", "4 is none of 0, 1, 2, 3"),
        ("--redirects 1:2", "there is no local rank 1"),
        ("--tee a:b", "neither 0..3 nor a list"),
        ("--local-ranks-filter 5", "there is no local rank 5"),
        ("--signals-to-handle SIGFOO", "SIGFOO is not a signal"),
        ("--signals-to-handle SIGKILL", "SIGKILL cannot be handled"),
        ("--no-python --module", "exclude each other"),
        ("--master-port x", "invalid int value"),
        ("--start-method thread", "invalid choice"),
    ],
)
def test_refused(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What makes no sense or is not supported ends with 2 and one sentence that says why."""
    with pytest.raises(SystemExit) as end:
        parse([*arguments.split(), SCRIPT])
    message = capsys.readouterr().err
    assert end.value.code == 2
    assert words in message
    assert message.startswith("cydistrun: ")
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("has_slurm", "line"),
    [
        (
            False,
            "torchrun does, and its ranks can use cydist: torchrun --nnodes 2:4 --nproc-per-node 3 "
            f"--max-restarts 3 --rdzv-backend c10d --rdzv-endpoint h:29500 {SCRIPT} 'a b'",
        ),
        (
            True,
            "Slurm takes as many hosts as it has at each start, and its ranks can use cydist: "
            "sbatch --nodes=2-4 --ntasks-per-node=3 --requeue --wrap "
            f"'srun --kill-on-bad-exit=1 python {SCRIPT} '\"'\"'a b'\"'\"''",
        ),
    ],
    ids=["torchrun", "Slurm"],
)
def test_an_elastic_number_of_hosts(
    has_slurm: bool, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Is refused with the command line of Slurm, where it is installed, or else of torchrun."""
    if has_slurm:
        (tmp_path / "sbatch").touch(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as end:
        parse(["--nnodes", "2:4", "-n", "3", "--master-addr", "h", SCRIPT, "a b"])
    assert end.value.code == 2
    words = f"--nnodes 2:4: cydistrun does not support an elastic number of hosts. {line};"
    assert words in capsys.readouterr().err


def test_slurm_has_no_words_for_a_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """sbatch refuses --ntasks-per-node=gpu, so the line has a place to fill in."""
    (tmp_path / "sbatch").touch(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit):
        parse(["--nnodes", "2:4", "-n", "gpu", SCRIPT])
    assert "sbatch --nodes=2-4 --ntasks-per-node=N --requeue" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nproc-per-nod", "2", SCRIPT], "did you mean --nproc-per-node?"),
        (["--max_restart=2", SCRIPT], "did you mean --max-restarts?"),
        (["nowhere.py"], "no file 'nowhere.py'"),
        (["--no-python", "no-such-program"], "no program 'no-such-program'"),
    ],
)
def test_misspelt(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown option or program is named, with what may have been meant."""
    with pytest.raises(SystemExit):
        parse(arguments)
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "value", "name", "expected"),
    [
        ("PET_NPROC_PER_NODE", "4", "local_size", 4),
        ("PET_MASTER_PORT", "1234", "master_port", 1234),
        ("PET_MAX_RESTARTS", "3", "max_restarts", 3),
        ("PET_NO_PREFIX", "1", "prefix", False),
        ("PET_NO_PREFIX", "0", "prefix", True),
        ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7", "grace", 7.0),
        ("PET_SHUTDOWN_TIMEOUT", "8", "grace", 8.0),
    ],
)
def test_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, name: str, expected: object
) -> None:
    """Options have twins in the environment."""
    monkeypatch.setenv(variable, value)
    assert getattr(parse([SCRIPT]), name) == expected


def test_command_line_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option on the command line overrides its twin in the environment."""
    monkeypatch.setenv("PET_NPROC_PER_NODE", "4")
    assert parse(["--nproc-per-node", "2", SCRIPT]).local_size == 2


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, 3), ("0,2", 2), ("", CPUS), ("-1", CPUS), ("5,6,7,8", 3)]
)
def test_auto_counts_visible_devices(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: int
) -> None:
    """`auto` is the GPUs that CUDA_VISIBLE_DEVICES leaves, or without any the CPUs."""
    devices = [f"/dev/nvidia{number}" for number in range(3)]
    monkeypatch.setattr("cydist.launch.options.glob.glob", lambda pattern: devices)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert parse(["-n", "auto", SCRIPT]).local_size == expected


def test_secret_file_for_several_hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a secret file several hosts are accepted, on torchrun's default port."""
    (tmp_path / "key").touch()
    monkeypatch.setenv("CYDIST_SECRET_FILE", str(tmp_path / "key"))
    monkeypatch.setenv("PET_NNODES", "3")
    options = parse(["--node-rank", "2", "--master-addr", "h", "-n", "2", SCRIPT])
    assert (options.nodes, options.master_port, options.run_id) == (3, 29500, "none")


@given(st.dictionaries(st.integers(0, 9), st.integers(0, 3), min_size=1))
def test_streams_by_rank(wanted: dict[int, int]) -> None:
    """Any list of local ranks and streams is read back; 0 means none."""
    text = ",".join(f"{rank}:{streams}" for rank, streams in wanted.items())
    expected = {rank: streams for rank, streams in wanted.items() if streams}
    assert which_streams("--tee", text, 10) == expected


@given(st.text(max_size=12))
def test_streams_of_any_text(text: str) -> None:
    """Any other text is refused with ValueError, or means what a number means."""
    streams = {}
    with contextlib.suppress(ValueError):
        streams = which_streams("--tee", text, 4)
    assert all(0 <= rank < 4 and 1 <= value <= 3 for rank, value in streams.items())


def run_launcher(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cydist.run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    "words",
    [
        "usage: cydistrun [options] script.py [arguments]",
        "Example: cydistrun --nproc-per-node 4 train.py --epochs 3",
        "processes on this host: a number, cpu, gpu, or auto (GPUs if any, else CPUs) (default: 1)",
        "up to N times (default: 0)",
        "local rank: 0:3,1:2 (default: 0)",
        "workers (default: SIGTERM,SIGINT,SIGHUP,SIGQUIT)",
        "seconds between SIGTERM and SIGKILL (default: 5)",
        "Only processes that know the job's secret join it.",
        "CYDIST_SECRET_FILE",
        "The exit code is that of the rank that failed first",
    ],
    ids=[
        "usage",
        "example",
        "size",
        "restarts",
        "streams",
        "signals",
        "grace",
        "secret",
        "file",
        "code",
    ],
)
def test_help(words: str) -> None:
    """--help shows the usage, an example, the defaults and what to do about the secret."""
    result = run_launcher("--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert words in " ".join(result.stdout.split())


def test_every_option_has_help() -> None:
    """No option that cydistrun takes lacks a word about it in --help."""
    silent = [action.dest for action in parser()._actions if not action.help]
    assert silent == []


def test_version() -> None:
    """--version shows the version of cydist, and starts nothing."""
    result = run_launcher("--version")
    assert (result.returncode, result.stdout) == (0, f"cydistrun {__version__}\n")


def test_version_of_cydist() -> None:
    """So does `python -m cydist --version`."""
    command = [sys.executable, "-m", "cydist", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (result.returncode, result.stdout) == (0, f"cydist {__version__}\n")


@pytest.mark.parametrize("arguments", [[], ["-n", "2"]], ids=["alone", "only options"])
def test_no_script(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Without a script the launcher says that it is missing, with the usage and an example."""
    with pytest.raises(SystemExit) as end:
        parse(arguments)
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "cydistrun: no script to start is given",
        "usage: cydistrun [options] script.py [arguments]",
        "Example: cydistrun --nproc-per-node 4 train.py --epochs 3",
    ]


# A value for each of torchrun's options that takes one.
TORCHRUN_VALUES = {
    "--nnodes": "1:1", "--nproc-per-node": "2", "--rdzv-backend": "static",
    "--rdzv-endpoint": "h:1234", "--rdzv-id": "job", "--rdzv-conf": "timeout=3",
    "--max-restarts": "1", "--monitor-interval": "5", "--start-method": "fork",
    "--event-log-handler": "console", "--role": "trainer", "--log-dir": "logs",
    "--redirects": "3", "--tee": "3", "--local-ranks-filter": "0",
    "--duplicate-stdout-filters": "x", "--duplicate-stderr-filters": "x", "--node-rank": "0",
    "--master-addr": "h", "--master-port": "1234", "--local-addr": "h", "--logs-specs": "mine",
    "--numa-binding": "node", "--signals-to-handle": "SIGTERM", "--shutdown-timeout": "7",
}  # fmt: skip


def test_every_option_of_torchrun(capsys: pytest.CaptureFixture[str]) -> None:
    """Works in each of its spellings, or is refused with the reason and the alternative."""
    run = pytest.importorskip("torch.distributed.run")
    options = [each for each in run.get_args_parser()._actions if each.option_strings]
    checked, refused = 0, set()
    for option in options:
        if "--help" in option.option_strings:
            continue
        name = max(option.option_strings, key=lambda each: (each.count("-"), len(each)))
        for spelling in option.option_strings:
            flag = option.nargs == 0
            words = [spelling] if flag else [spelling, TORCHRUN_VALUES[name]]
            script = {"--module": "somewhere", "--no-python": "true"}.get(name, SCRIPT)
            checked += 1
            try:
                assert parse([*words, script]).command == (script,), spelling
            except SystemExit:
                said = capsys.readouterr().err
                refused.add(name)
                assert f"{name} is not supported: {REFUSED[name]}" in said, said
                assert ";" in REFUSED[name], name
    assert checked >= 50
    assert refused == set(REFUSED)


@pytest.mark.parametrize("name", REFUSED_OF_MPIRUN)
def test_options_of_mpirun(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each that cydistrun lacks is refused with the reason and the alternative."""
    value = [] if name in REFUSED_FLAGS else ["60"]
    with pytest.raises(SystemExit) as end:
        parse([name, *value, SCRIPT])
    assert end.value.code == 2
    assert f"{name} is not supported: {REFUSED_OF_MPIRUN[name]}" in capsys.readouterr().err
    assert ";" in REFUSED_OF_MPIRUN[name]


@pytest.mark.parametrize("name", ["--hosts", "--host", "-H"])
def test_hosts_as_mpirun_takes_them(name: str) -> None:
    """With the number of ranks after a colon."""
    found = parse([name, "a:4,b:2", "--oversubscribe", "--allow-run-as-root", SCRIPT]).hosts
    assert [(host.name, host.size) for host in found] == [("a", "4"), ("b", "2")]


def test_launcher_imports_no_numbers() -> None:
    """The launcher's own modules need neither numpy nor compiled code."""
    rooms = "__main__ spawn options job"
    program = f"""
import sys, types
package = types.ModuleType("cydist")
package.__path__ = [{str(Path(sys.modules[LaunchOptions.__module__].__file__ or "").parents[1])!r}]
sys.modules["cydist"] = package
for room in {rooms.split()}:
    __import__("cydist.launch." + room)
print([name for name in sys.modules if name == "numpy" or name.startswith("cydist._native")])
"""
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "[]\n"


@pytest.mark.parametrize("name", ["key", "{}/key", "{}"])
def test_a_secret_file_that_is_not_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Is named, with the directory where a relative name begins, and not taken for unset."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CYDIST_SECRET_FILE", name.format(tmp_path))
    with pytest.raises(SystemExit):
        parse(["--nnodes", "2", "--master-addr", "h", SCRIPT])
    words = {
        "key": f"CYDIST_SECRET_FILE names key (from {tmp_path}), which does not exist",
        "{}/key": f"CYDIST_SECRET_FILE names {tmp_path}/key, which does not exist",
        "{}": f"CYDIST_SECRET_FILE names {tmp_path}, which is no regular file",
    }
    assert words[name] in capsys.readouterr().err
