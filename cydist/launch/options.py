"""The command line of cydistrun: torchrun's options, except those for elasticity.

Every option has an underscore spelling and a twin in the environment, PET_ and its name in
capitals, which the command line overrides. Refused options say why.
"""

from __future__ import annotations

import argparse
import difflib
import glob
import os
import shlex
import shutil
import signal
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from cydist import config
from cydist.config import __version__
from cydist.errors import AuthenticationError
from cydist.net.secret import renew_user_secret

DEFAULT_PORT = 29500
STREAMS = {1: "stdout", 2: "stderr"}
USAGE = "usage: cydistrun [options] script.py [arguments]"
EXAMPLE = "Example: cydistrun --nproc-per-node 4 train.py --epochs 3"

# torchrun's options that cydistrun refuses, with the reason.
REFUSED = {
    "--rdzv-conf": "there is no rendezvous service to configure; give --master-addr and "
    "--master-port",
    "--event-log-handler": "there are no event logs; --log-dir keeps what the ranks print",
    "--logs-specs": "there are no plug-ins for logs; give --log-dir, --redirects or --tee",
    "--duplicate-stdout-filters": "lines are not filtered; give --tee 1 and grep the log file",
    "--duplicate-stderr-filters": "lines are not filtered; give --tee 2 and grep the log file",
    "--numa-binding": "ranks are not bound; bind in the script, or start it with --no-python "
    "numactl",
    "--virtual-local-rank": "ranks of one host need different LOCAL_RANKs; choose the device in "
    "the script, as with torch.cuda.set_device(int(os.environ['LOCAL_RANK']))",
}
# mpirun's, likewise.
REFUSED_OF_MPIRUN = {
    "--hostfile": "hosts stand on the command line; give --hosts a:4,b:4",
    "--bind-to": "ranks are not bound; start each by --no-python taskset or numactl, or let mpirun "
    "or srun start and bind the ranks",
    "--map-by": "ranks fill one host after the other; give each host its number with --hosts "
    "a:4,b:4",
    "--report-bindings": "ranks are not bound; let mpirun or srun start and bind them",
    "-x": "ranks of this host have your environment; give --export NAME for those of other --hosts",
    "--wdir": "ranks start in this directory; change to another first",
    "--timeout": "a job has no time limit; start it by timeout: timeout 60 cydistrun ...",
    "--output-filename": "files have other names; give --log-dir DIR",
    "--tag-output": "each line has its rank already; leave it out",
    "--timestamp-output": "lines have no time; send the output through ts",
    "--display-map": "ranks fill one host after the other; print the host's name in the script",
}
REFUSED_FLAGS = {  # the others take a value
    "--virtual-local-rank", "--report-bindings", "--tag-output", "--timestamp-output",
    "--display-map",
}  # fmt: skip


class ListedHost(NamedTuple):
    """One host of --hosts.

    Attributes:
        name: As the user wrote it: HOST or USER@HOST.
        size: Its number of processes, as --nproc-per-node takes it.
    """

    name: str
    size: str


class LaunchOptions(NamedTuple):
    """The program, its place and its output options, checked and resolved.

    A job that --hosts starts has these too.

    Attributes:
        hosts: Where to start launchers; empty on these hosts.
        given: The options as they were given, for the launchers there.
        exported: Variables that the launchers there get beside the usual ones.
        label: The name of this launcher's host in the list.
    """

    command: tuple[str, ...]
    is_script: bool = True  # run by this Python; else a module or a program
    is_module: bool = False
    local_size: int = 1
    nodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int | None = None  # None: a free one
    run_id: str = ""
    role: str = "default"
    max_restarts: int = 0
    restart_delay: float = 0.1
    keep_going: bool = False
    grace: float = 5.0  # seconds between the first signal and SIGKILL
    signals: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    log_dir: str | None = None
    redirects: Mapping[int, int] = {}  # local rank -> 1 out, 2 err, 3 both
    tee: Mapping[int, int] = {}
    shown: frozenset[int] | None = None  # local ranks on the console; None: all
    prefix: bool = True
    pass_local_rank: bool = False
    hosts: tuple[ListedHost, ...] = ()
    given: Mapping[str, Any] = {}
    exported: tuple[str, ...] = ()
    label: str = ""
    report_hangs: float = 0.0  # seconds; 0: never

    @property
    def speaks(self) -> bool:
        """Return whether this launcher prints what concerns all hosts."""
        return not self.label or self.node_rank == 0


class Parser(argparse.ArgumentParser):
    """argparse for options with underscore spellings and twins in the environment."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self._flags = {"-h": True, "--help": True}  # every option; True: takes no value

    def option(
        self, group: Any, *names: str, flag: bool = False, default: Any = None, **more: Any
    ) -> None:
        """Add one option. The value of its twin in the environment replaces `default`."""
        twin = config.Variable((f"PET_{names[0][2:].replace('-', '_').upper()}",), "", "")
        self._flags.update(dict.fromkeys(names, flag))
        text = more.get("help", "")
        if default not in (None, "") and text != argparse.SUPPRESS and "default" not in text:
            more["help"] = f"{text} (default: {default})"
        if flag:
            group.add_argument(*names, action="store_true", default=twin.is_on(), **more)
        else:
            group.add_argument(*names, default=twin.get() or default, **more)

    def hyphens(self, argv: Sequence[str]) -> list[str]:
        """Return `argv` with --a_b as --a-b, up to the script, whose arguments stay unchanged."""
        out = list(argv)
        place = 0
        while place < len(out) and out[place].startswith("-") and out[place] != "--":
            name, equals, value = out[place].partition("=")
            name = name.replace("_", "-")
            if name == "--use-env" and value.lower() in ("true", "1"):  # as torch documented it
                out[place] = name
            elif name.startswith("--"):
                out[place] = name + equals + value
            place += 1 if equals or self._flags.get(name, True) else 2
        return out

    def error(self, message: str) -> NoReturn:
        if message.startswith("the following arguments are required: script"):
            self.exit(2, f"{self.prog}: no script to start is given\n{USAGE}\n{EXAMPLE}\n")
        unknown = message.rpartition("unrecognized arguments: ")[2] if "unrec" in message else ""
        close = difflib.get_close_matches(unknown.split(" ")[0].split("=")[0], self._flags, 1)
        hint = f" (did you mean {close[0]}?)" if unknown and close else ""
        self.exit(2, f"{self.prog}: {message}{hint}; see {self.prog} --help\n")


class _Version(argparse.Action):
    """Print cydist's version, and end."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(parser.prog, __version__)
        parser.exit()


class _NewSecret(argparse.Action):
    """Renew the user's secret, and end."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        try:
            path = renew_user_secret()
        except AuthenticationError as error:
            parser.exit(1, f"{parser.prog}: {error}\n")
        parser.exit(
            0, f"{parser.prog}: {path} holds a new secret; jobs that run keep the former one\n"
        )


def parser() -> Parser:
    """Return the argparse parser of the command line."""
    it = Parser(
        prog="cydistrun",
        usage=USAGE.removeprefix("usage: "),
        description=f"Start N processes of a program as the ranks of one job. {EXAMPLE}",
        epilog="Only processes that know the job's secret join it. On one host, with --hosts, and "
        "on hosts that share your home there is nothing to set. For others copy one file, mode "
        "0600, to every host, and name it in CYDIST_SECRET_FILE. "
        "Every option can be given in the environment: PET_NPROC_PER_NODE=4. "
        "The exit code is that of the rank that failed first, 128 + the number of a signal, or 2 "
        "for a wrong command line.",
        allow_abbrev=False,
    )
    add = it.option
    sizes = it.add_argument_group("how many, and where")
    add(
        sizes, "--nproc-per-node", "--nproc", "--np", "-np", "-n", default="1", metavar="N",
        help="processes on this host: a number, cpu, gpu, or auto (GPUs if any, else CPUs)",
    )  # fmt: skip
    add(
        sizes, "--hosts", "--host", "-H", default="", metavar="HOST:N,...",
        help="hosts, each with its number of processes: start cydistrun on all of them by ssh",
    )  # fmt: skip
    add(
        sizes, "--export", default="", metavar="NAMES",
        help="with --hosts: further variables of this environment that ranks elsewhere find",
    )  # fmt: skip
    add(sizes, "--nnodes", default="1", metavar="N", help="hosts; start cydistrun on each")
    add(sizes, "--node-rank", type=int, default=0, metavar="K", help="this host's number")
    add(sizes, "--master-addr", default="", metavar="HOST", help="address of host 0")
    add(
        sizes, "--master-port", type=int, default=None, metavar="PORT",
        help=f"port of rank 0's store; default: a free one, with several hosts {DEFAULT_PORT}; 0: "
        "a free one, also with --hosts",
    )  # fmt: skip
    add(sizes, "--standalone", flag=True, help="one host, a free port: the default")
    add(sizes, "--role", default="default", help="exported as ROLE_NAME")

    what = it.add_argument_group("what to start")
    add(what, "--module", "-m", flag=True, help="the script is a module's name, as in python -m")
    add(what, "--no-python", flag=True, help="the script is a program of its own")
    add(what, "--run-path", flag=True, help="the script is a path (the default)")
    add(
        what, "--pass-local-rank", flag=True,
        help="give the script --local-rank=K before its arguments, as python -m cydist.launch does",
    )  # fmt: skip
    add(
        what, "--use-env", flag=True,
        help="python -m cydist.launch passes no --local-rank; LOCAL_RANK is always exported",
    )  # fmt: skip

    it.add_argument(
        "--version", action=_Version, nargs=0, help="show cydist's version, and start nothing"
    )
    what.add_argument(
        "--new-secret", action=_NewSecret, nargs=0,
        help="replace the user's own secret by a new one, and start nothing",
    )  # fmt: skip

    end = it.add_argument_group("failures and signals")
    add(
        end, "--max-restarts", type=int, default=0, metavar="N",
        help="after a failure restart all ranks of all hosts, up to N times",
    )  # fmt: skip
    add(
        end, "--restart-delay", type=float, default=0.1, metavar="SECONDS",
        help="between a failure and the restart",
    )  # fmt: skip
    add(
        end, "--keep-going", flag=True,
        help="after a failure let the other ranks go on; the exit code is the failed rank's",
    )  # fmt: skip
    add(
        end, "--shutdown-timeout", type=float, metavar="SECONDS",
        default=config.SHUTDOWN_TIMEOUT.get(),
        help="seconds between SIGTERM and SIGKILL (default: 5)",
    )  # fmt: skip
    add(
        end, "--signals-to-handle", default="SIGTERM,SIGINT,SIGHUP,SIGQUIT", metavar="NAMES",
        help="signals that end the job and are forwarded to the workers",
    )  # fmt: skip

    add(
        end, "--report-hangs", type=float, default=0.0, metavar="SECONDS",
        help="when a call takes longer, print what each rank does, and the stacks of late ranks "
        "(default: never)",
    )  # fmt: skip

    out = it.add_argument_group("output")
    add(
        out, "--log-dir", metavar="DIR",
        help="keep every worker's output below DIR as well, in files of mode 0600",
    )  # fmt: skip
    add(
        out, "--redirects", "-r", default="0", metavar="WHICH",
        help="to log files instead of the console: 0 none, 1 stdout, 2 stderr, 3 both; or by "
        "local rank: 0:3,1:2",
    )  # fmt: skip
    add(
        out, "--tee", "-t", default="0", metavar="WHICH",
        help="to log files and the console; as --redirects, over which it wins",
    )  # fmt: skip
    add(
        out, "--local-ranks-filter", default="", metavar="RANKS",
        help="only these local ranks show on the console: 0,2",
    )  # fmt: skip
    add(out, "--no-prefix", flag=True, help="lines are not prefixed with [rank]")

    same = it.add_argument_group("for command lines of torchrun and mpirun")
    add(same, "--rdzv-backend", default="static", help="static; c10d with one host")
    add(same, "--rdzv-endpoint", default="", help="HOST:PORT, as --master-addr and --master-port")
    add(same, "--rdzv-id", default="", help="exported as CYDIST_RUN_ID")
    add(same, "--monitor-interval", type=float, default=0.1, help="not needed: nothing is polled")
    add(
        same, "--start-method", default="spawn", choices=["spawn", "fork", "forkserver"],
        help="not needed: workers are programs",
    )  # fmt: skip
    add(same, "--local-addr", default="", help="not needed: ranks find their own address")
    for name in ("--oversubscribe", "--allow-run-as-root"):
        add(same, name, flag=True, help="mpirun's; not needed: it is always so")
    for name in REFUSED | REFUSED_OF_MPIRUN:
        add(same, name, flag=name in REFUSED_FLAGS, help=argparse.SUPPRESS)

    it.add_argument("script", help="what to start")
    it.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments").required = False
    return it


def parse(argv: Sequence[str], *, passes_local_rank: bool = False) -> LaunchOptions:
    """Return the options in `argv`. Exits with 2 and one sentence if they are invalid.

    Args:
        passes_local_rank: Without --use-env, scripts get --local-rank=K before their arguments.
    """
    it = parser()
    given = it.parse_args(it.hyphens(argv))
    try:
        if passes_local_rank and not given.use_env:
            if given.no_python:
                raise ValueError(
                    "--no-python needs --use-env here, since a program need not know "
                    "--local-rank; cydistrun needs none"
                )
            given.pass_local_rank = True
        if given.hosts:
            return _resolve_hosts(given)
        options = resolve(given)
        if options.nodes > 1 and not config.INSECURE.is_on():
            _check_secret_file(config.SECRET_FILE.get())
        return options
    except ValueError as error:
        it.error(str(error))


def resolve(given: argparse.Namespace) -> LaunchOptions:
    """Return the options of one host's launcher. Raises ValueError if they are invalid."""
    for name, reason in (REFUSED | REFUSED_OF_MPIRUN).items():
        value = getattr(given, name.lstrip("-").replace("-", "_"))
        if value not in (None, False, "", "null", "0"):
            raise ValueError(f"{name} is not supported: {reason}")
    nodes = _nodes(given)
    if not 0 <= given.node_rank < nodes:
        raise ValueError(f"--node-rank {given.node_rank} is not in 0..{nodes - 1} (--nnodes)")
    local_size = local_world_size(given.nproc_per_node)
    address, port = _endpoint(given, nodes)
    for name, value in (
        ("--max-restarts", given.max_restarts),
        ("--restart-delay", given.restart_delay),
        ("--shutdown-timeout", given.shutdown_timeout),
        ("--report-hangs", given.report_hangs),
    ):
        if not value >= 0:
            raise ValueError(f"{name} must not be negative, nor NaN: got {value}")
    if given.max_restarts and given.keep_going:
        raise ValueError("--max-restarts and --keep-going exclude each other")
    everywhere = dict.fromkeys(range(local_size), 3) if given.log_dir else {}
    redirects = which_streams("--redirects", given.redirects, local_size)
    return LaunchOptions(
        command=(given.script, *given.arguments),
        is_script=_check_program(given),
        is_module=given.module,
        local_size=local_size,
        nodes=nodes,
        node_rank=given.node_rank,
        master_addr=address,
        master_port=port,
        run_id=given.rdzv_id or ("none" if nodes > 1 else os.urandom(8).hex()),
        role=given.role,
        max_restarts=given.max_restarts,
        restart_delay=given.restart_delay,
        keep_going=given.keep_going,
        grace=given.shutdown_timeout,
        signals=_signals(given.signals_to_handle),
        log_dir=given.log_dir,
        redirects=redirects,
        # A log directory implies logs.
        tee=which_streams("--tee", given.tee, local_size) or ({} if redirects else everywhere),
        shown=_shown(given.local_ranks_filter, local_size),
        prefix=not given.no_prefix,
        pass_local_rank=given.pass_local_rank,
        report_hangs=given.report_hangs,
    )


def _resolve_hosts(given: argparse.Namespace) -> LaunchOptions:
    """Return the options of a job whose launchers are to be started on other hosts."""
    for name in ("--nnodes", "--node-rank", "--standalone", "--rdzv-endpoint"):
        value = getattr(given, name[2:].replace("-", "_"))
        if value not in ("1", 0, False, ""):
            raise ValueError(f"{name} and --hosts exclude each other")
    hosts = listed_hosts(given.hosts, given.nproc_per_node)
    exported = tuple(filter(None, map(str.strip, given.export.split(","))))
    if unset := [name for name in exported if name not in os.environ]:
        raise ValueError(f"--export: {unset[0]} is not set here")
    given.rdzv_id = given.rdzv_id or os.urandom(8).hex()
    # What depends on the host is checked there: its GPUs or CPUs, and which local ranks it has.
    local = {"redirects": "0", "tee": "0", "local_ranks_filter": "", "nproc_per_node": "1"}
    # The first host chooses a port in place of 0.
    port = DEFAULT_PORT if given.master_port == 0 else given.master_port
    for node, host in enumerate(hosts):
        here = for_host(vars(given), hosts, node, "host0", port)
        found = resolve(argparse.Namespace(**here | ({} if host.size.isdigit() else local)))
    address = given.master_addr.removeprefix("[").removesuffix("]")
    return found._replace(
        nodes=len(hosts), node_rank=0, master_addr=address, hosts=hosts, given=vars(given),
        exported=exported,
    )  # fmt: skip


def listed_hosts(text: str, size: str) -> tuple[ListedHost, ...]:
    """Return the hosts in `a:2,b`, of which those without a number have `size` processes.

    Raises ValueError for what is no such list.
    """
    hosts: list[ListedHost] = []
    for part in text.split(","):
        name, colon, tail = part.strip().rpartition(":")
        if not colon or tail.endswith("]"):
            name, tail = part.strip(), size
        bare = name.rpartition("@")[2]
        count = tail.isdigit() or tail in ("cpu", "gpu", "auto")
        # ssh gets the name without brackets, and would take this one for an option.
        option = any(each.lstrip("[]").startswith("-") for each in (name, bare))
        if not bare or option or not tail or any(map(str.isspace, name)):
            raise ValueError(f"--hosts {text!r}: {part!r} is not HOST or HOST:N")
        if ":" in bare and not (bare.startswith("[") and bare.endswith("]")):
            raise ValueError(
                f"--hosts: {part!r} has two colons: write an IPv6 address in brackets, and a port "
                "into ~/.ssh/config"
            )
        if any(name == other.name for other in hosts):
            raise ValueError(f"--hosts: {name} is given twice: give it once, with all its ranks")
        if not count:
            raise ValueError(
                f"--hosts {text!r}: {tail!r} processes on {name}: give a number, cpu, gpu or auto"
            )
        hosts.append(ListedHost(name, tail))
    return tuple(hosts)


def for_host(
    given: Mapping[str, Any],
    hosts: Sequence[ListedHost],
    node: int,
    address: str,
    port: int | None,
) -> dict[str, Any]:
    """Return the options as if they had been given on one of the hosts.

    Args:
        address: Of the first host, as the others reach it.
        port: Of rank 0's store there.
    """
    return {
        **given, "hosts": "", "export": "", "nnodes": str(len(hosts)), "node_rank": node,
        "nproc_per_node": hosts[node].size, "master_addr": address, "master_port": port,
    }  # fmt: skip


def _nodes(given: argparse.Namespace) -> int:
    low, _, high = given.nnodes.partition(":")
    try:
        nodes, most = int(low), int(high or low)
    except ValueError:
        raise ValueError(f"--nnodes {given.nnodes!r} is not a number") from None
    if most != nodes:
        raise ValueError(
            f"--nnodes {given.nnodes}: cydistrun does not support an elastic number of hosts. "
            f"{_for_others(given, nodes, most)}"
        )
    if nodes < 1:
        raise ValueError(f"--nnodes must be at least 1, got {nodes}")
    if given.standalone and nodes > 1:
        raise ValueError(f"--standalone means one host, but --nnodes is {nodes}")
    works = ("static", "c10d") if nodes == 1 else ("static",)
    if given.rdzv_backend not in works and not given.standalone:  # as torchrun, which ignores it
        raise ValueError(
            f"--rdzv-backend {given.rdzv_backend} is not supported: there is no rendezvous service "
            "that numbers the hosts; start cydistrun on every host with --nnodes, --node-rank, "
            "--master-addr and --master-port, or once with --hosts"
        )
    return nodes


def _for_others(given: argparse.Namespace, least: int, most: int) -> str:
    """Return the command lines of other launchers that start this elastic job."""
    program = shlex.join((given.script, *given.arguments))
    if shutil.which("sbatch"):
        kind = "-m " if given.module else ""
        step = f"srun --kill-on-bad-exit=1 {'' if given.no_python else f'python {kind}'}{program}"
        tasks = given.nproc_per_node if given.nproc_per_node.isdigit() else "N"
        return (
            "Slurm takes as many hosts as it has at each start, and its ranks can use cydist: "
            f"sbatch --nodes={least}-{most} --ntasks-per-node={tasks} --requeue "
            f"--wrap {shlex.quote(step)}"
        )
    endpoint = f"{given.master_addr or 'HOST'}:{given.master_port or DEFAULT_PORT}"
    return (
        f"torchrun does, and its ranks can use cydist: torchrun --nnodes {given.nnodes} "
        f"--nproc-per-node {given.nproc_per_node} --max-restarts 3 --rdzv-backend c10d "
        f"--rdzv-endpoint {endpoint} {program}"
    )


def local_world_size(text: str) -> int:
    """Return how many processes `--nproc-per-node` asks for on this host."""
    if text == "cpu":
        return len(os.sched_getaffinity(0))
    if text == "auto":
        return visible_gpus() or len(os.sched_getaffinity(0))
    if text == "gpu":
        if not (gpus := visible_gpus()):
            raise ValueError("--nproc-per-node gpu: this host shows no CUDA device")
        return gpus
    if text == "xpu":
        raise ValueError(
            "--nproc-per-node xpu: cydist has no backend for XPUs and does not count them; give "
            "the number"
        )
    try:
        size = int(text)
    except ValueError:
        raise ValueError(f"--nproc-per-node {text!r} is not a number, cpu, gpu or auto") from None
    if size < 1:
        raise ValueError(f"--nproc-per-node must be at least 1, got {size}")
    with open("/proc/sys/kernel/pid_max") as file:
        most = int(file.read())
    if size > most:  # before anything is made for each of them
        raise ValueError(f"--nproc-per-node {size}: this host can have {most} processes")
    return size


def visible_gpus() -> int:
    """Return the number of CUDA devices that a worker would see, without a GPU library."""
    devices = len(glob.glob("/dev/nvidia[0-9]*"))
    chosen = config.CUDA_VISIBLE_DEVICES.get()
    if chosen == config.CUDA_VISIBLE_DEVICES.default:
        return devices
    names = [name.strip() for name in chosen.split(",")]
    # CUDA itself stops at the first name that makes no sense.
    return min(devices, len([name for name in names if name and name != "-1"]))


def _endpoint(given: argparse.Namespace, nodes: int) -> tuple[str, int | None]:
    """Return address and port of rank 0's store; port None: a free one."""
    address, port = given.master_addr, given.master_port
    if given.rdzv_endpoint and not address and not given.standalone:
        host, _, tail = given.rdzv_endpoint.rpartition(":")
        if not tail.isdigit() or "]" in tail:
            host, tail = given.rdzv_endpoint, ""
        address = host
        # Under c10d that port was the rendezvous service's, not the store's.
        if tail and port is None and given.rdzv_backend == "static":
            port = int(tail)
    if nodes > 1 and not address:
        raise ValueError("several hosts need --master-addr, the address of host 0; or --hosts")
    if port == 0 and nodes > 1:
        raise ValueError(
            "--master-port 0 means a free port, which the other hosts cannot know: give every host "
            "the same number, or start all of them with --hosts"
        )
    port = port or (DEFAULT_PORT if nodes > 1 else None)
    if port is not None and not 0 < port < 65536:
        raise ValueError(f"--master-port {port} is not in 1..65535")
    if given.standalone:
        return "127.0.0.1", None
    return address.removeprefix("[").removesuffix("]") or "127.0.0.1", port


def _check_secret_file(path: str) -> None:
    """Check that the file is there which the user named; without one, hosts share a home."""
    if path and not os.path.isfile(path):
        where = "" if os.path.isabs(path) else f" (from {os.getcwd()})"
        what = "is no regular file" if os.path.exists(path) else "does not exist"
        raise ValueError(
            f"CYDIST_SECRET_FILE names {path}{where}, which {what} on this host: copy the job's "
            "secret there, mode 0600"
        )


def which_streams(option: str, text: str, local_size: int) -> dict[int, int]:
    """Return `3` or `0:3,1:2` as {local rank: streams}, without ranks that have no streams."""
    streams: dict[int, int] = {}
    try:
        if ":" not in text:
            streams = dict.fromkeys(range(local_size), int(text))
        else:
            for part in text.split(","):
                rank, _, value = part.partition(":")
                streams[int(rank)] = int(value)
    except ValueError:
        raise ValueError(f"{option} {text!r} is neither 0..3 nor a list like 0:3,1:2") from None
    for local_rank, which in streams.items():
        if not 0 <= which <= 3:
            raise ValueError(f"{option} {text!r}: {which} is none of 0, 1, 2, 3")
        if not 0 <= local_rank < local_size:
            raise ValueError(f"{option} {text!r}: there is no local rank {local_rank}")
    return {local_rank: which for local_rank, which in streams.items() if which}


def _shown(text: str, local_size: int) -> frozenset[int] | None:
    if not text:
        return None
    try:
        ranks = frozenset(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--local-ranks-filter {text!r} is not a list like 0,2") from None
    if unknown := [rank for rank in sorted(ranks) if not 0 <= rank < local_size]:
        raise ValueError(f"--local-ranks-filter: there is no local rank {unknown[0]}")
    return ranks


def _signals(text: str) -> tuple[int, ...]:
    numbers = []
    for name in filter(None, (part.strip().upper() for part in text.split(","))):
        number = getattr(signal, name if name.startswith("SIG") else f"SIG{name}", None)
        if not isinstance(number, signal.Signals):
            raise ValueError(f"--signals-to-handle: {name} is not a signal")
        if number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
            raise ValueError(f"--signals-to-handle: {name} cannot be handled")
        numbers.append(int(number))
    return tuple(numbers)


def _check_program(given: argparse.Namespace) -> bool:
    """Check that the program can be found; return True for a script."""
    if given.module and given.no_python:
        raise ValueError("--module and --no-python exclude each other")
    if given.no_python and not given.run_path:
        if shutil.which(given.script) is None:
            raise ValueError(f"no program {given.script!r} on the PATH")
        return False
    if given.module:
        return False
    if not os.path.exists(given.script):
        raise ValueError(f"no file {given.script!r} (for a module: -m, for a program: --no-python)")
    return True
