"""cydist's version, and every environment variable that it honours, read here and nowhere else.

A torch variable is honoured under its own name; its CYDIST_ twin wins.
"""

from __future__ import annotations

import os

# The version of cydist, which stands here only: pyproject.toml reads it.
__version__ = "0.9.0"


class Variable:
    """One setting: its names (the first that is set wins), its default and its meaning."""

    __slots__ = ("default", "meaning", "names")  # made at import: a NamedTuple takes much longer

    def __init__(self, names: tuple[str, ...], default: str, meaning: str) -> None:
        self.names = names
        self.default = default
        self.meaning = meaning

    def get(self) -> str:
        """Return its current value."""
        for name in self.names:
            value = os.environ.get(name)
            if value is not None:
                return value
        return self.default

    def pop(self) -> str:
        """Return its current value and unset it, so that neither this process nor its children read
        it again."""
        value = self.get()
        for name in self.names:
            os.environ.pop(name, None)
        return value

    def is_on(self) -> bool:
        """Return whether this switch is on."""
        return self.get().strip().lower() not in ("", "0", "false", "off", "no")


INTERFACES = Variable(
    ("CYDIST_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
    "",
    "network interfaces to listen on, separated by commas; calls use them in turn",
)
TRANSPORT = Variable(
    ("CYDIST_TRANSPORT",),
    "auto",
    "shm: ranks must share memory; tcp: sockets only; mpi: MPI only; auto: memory where ranks can "
    "share it",
)
ALGORITHM = Variable(("CYDIST_ALGORITHM",), "", "forces algorithms: all_reduce:ring,broadcast:tree")
TUNING = Variable(
    ("CYDIST_TUNING",),
    "",
    "path of the tuning file that bench --tune wrote, read on rank 0; off; default: the user's own",
)
SEGMENT_BYTES = Variable(("CYDIST_SEGMENT_BYTES",), "", "unit of pipelining, in bytes")
SECRET_FD = Variable(("CYDIST_SECRET_FD",), "", "inherited descriptor that holds the job's secret")
SECRET_FILE = Variable(
    ("CYDIST_SECRET_FILE",),
    "",
    "file, mode 0600, that holds the job's secret; not for jobs that cydistrun starts on one host "
    "or with --hosts: those get a new one",
)
STATE_HOME = Variable(
    ("XDG_STATE_HOME",),
    "",
    "directory of the user's own secret and tuning file; default: ~/.local/state",
)
RUNTIME_DIR = Variable(
    ("XDG_RUNTIME_DIR",), "", "where ranks on one host meet without an address; default: /tmp"
)
INSECURE = Variable(("CYDIST_INSECURE",), "0", "1 switches authentication off, with a warning")
NAT = Variable(
    ("CYDIST_NAT",),
    "0",
    "1 on all ranks: connections may have their addresses translated, and so may be relayed",
)
ENCRYPT = Variable(
    ("CYDIST_ENCRYPT",), "0", "1 on all ranks: every socket of the job is encrypted, or no start"
)
PEER_TIMEOUT = Variable(
    ("CYDIST_PEER_TIMEOUT",),
    "15",
    "seconds after which a host counts as gone if even its kernel is silent: 2 or more; inf: never",
)
DETERMINISTIC = Variable(
    ("CYDIST_DETERMINISTIC",), "0", "1: reduce in rank order with one rounding, on every transport"
)
ISA = Variable(
    ("CYDIST_ISA",),
    "",
    "forces a variant of the kernels: baseline, avx2, avx512, avx512bf16 or avx512fp16",
)
DEBUG = Variable(
    ("CYDIST_DEBUG", "TORCH_DISTRIBUTED_DEBUG"),
    "OFF",
    "DETAIL on all ranks: collectives are compared before they run, which costs a round trip; OFF "
    "or INFO: while they run",
)
LOG = Variable(
    ("CYDIST_LOG",),
    "",
    "info or debug: log lines on stderr; info:FILE or debug:FILE appends them to a file, in whose "
    "name %h is the host and %p the process; off: none",
)
TORCH_LOG_LEVEL = Variable(
    ("TORCH_CPP_LOG_LEVEL",),
    "WARNING",
    "INFO: as CYDIST_LOG=info, with TORCH_DISTRIBUTED_DEBUG at INFO or DETAIL as "
    "CYDIST_LOG=debug; where CYDIST_LOG is not set",
)
TRACEBACK = Variable(
    ("CYDIST_TRACEBACK",),
    "short",
    "full: tracebacks show all frames of cydist, and cydistrun those of all ranks; short: few",
)
CHECK_NAN = Variable(
    ("CYDIST_CHECK_NAN",),
    "0",
    "1 on all ranks: NaN or infinity in an array of a call is an error that says where it is",
)
RECORDER = Variable(
    ("CYDIST_RECORDER",),
    "",
    "directory where each rank leaves its last calls, as rank-0.json: when a group fails, on "
    "SIGUSR2, and at its end",
)
RUN_FILES = Variable(
    ("CYDIST_RUN_FILES",),
    "",
    "directory where ranks keep their last calls for `cydist ps DIR`; cydistrun sets it, for other "
    "launchers you do",
)
METRICS = Variable(
    ("CYDIST_METRICS",),
    "",
    "[HOST]:PORT where cydistrun serves metrics of this host's ranks for Prometheus; without HOST: "
    "127.0.0.1",
)
FAILPOINT = Variable(
    ("CYDIST_FAILPOINT",), "", "for tests: end this process at a place, as in send.mid:kill"
)
FIRST_COUNT = Variable(
    ("CYDIST_FIRST_COUNT",),
    "",
    "for tests: what counters of calls, messages, bytes and steps begin with, to pass 2**32 or "
    "2**64 soon; alike on all ranks",
)
RUN_ID = Variable(
    ("CYDIST_RUN_ID",),
    "",
    "the job's name, set by cydistrun: random on one host, else `--rdzv-id` or none",
)
RESTART_COUNT = Variable(
    ("CYDIST_RESTART_COUNT",), "0", "how often cydistrun has restarted the job's ranks"
)
STORE_FD = Variable(
    ("CYDIST_STORE_FD",), "", "rank 0's inherited socket, which listens on the port of the store"
)
STORE_PORT = Variable(
    ("CYDIST_STORE_PORT",),
    "",
    "port of the store, and the MASTER_ADDR:MASTER_PORT in whose place it stands; set by cydistrun "
    "on one host, and by spawn",
)
MASTER_ADDR = Variable(("CYDIST_MASTER_ADDR", "MASTER_ADDR"), "", "where rank 0 serves the store")
MASTER_PORT = Variable(
    ("CYDIST_MASTER_PORT", "MASTER_PORT"),
    "",
    "the store's port, where CYDIST_STORE_PORT is not set",
)
SSH_CONNECTION = Variable(
    ("SSH_CONNECTION",),
    "",
    "the addresses of ssh's connection, by which cydistrun --hosts finds that of the first host",
)
ERROR_FILE = Variable(
    ("CYDIST_ERROR_FILE", "TORCHELASTIC_ERROR_FILE"),
    "",
    "JSON that a failing worker may leave for its launcher: {message, traceback}",
)
SHUTDOWN_TIMEOUT = Variable(
    ("CYDIST_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
    "5",
    "seconds that cydistrun gives workers to end before it kills them; inf: as long as they take",
)
CUDA_VISIBLE_DEVICES = Variable(
    ("CUDA_VISIBLE_DEVICES",), "all", "devices that count for cydistrun --nproc-per-node gpu"
)
MPI_CUDA_AWARE = Variable(
    ("CYDIST_MPI_CUDA_AWARE",),
    "0",
    "1: backend mpi hands arrays on GPUs to MPI as they are, where MPI has the call",
)
NCCL_BINDING = Variable(
    ("CYDIST_NCCL_BINDING",),
    "",
    "how backend nccl calls NCCL: cupy, torch, or nccl4py; by default cupy, and torch without cupy",
)
NCCL_BLOCKING_WAIT = Variable(
    ("CYDIST_NCCL_BLOCKING_WAIT", "TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"),
    "0",
    "1: calls of backend nccl, and work.wait(), block until the GPU has come past the call",
)
NCCL_ERROR_HANDLING = Variable(
    (
        "CYDIST_NCCL_ASYNC_ERROR_HANDLING",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_ASYNC_ERROR_HANDLING",
    ),
    "0",
    "1 or 3: a group of backend nccl that fails ends its process; 0 or 2: later calls raise",
)
NCCL_HOSTID = Variable(
    ("NCCL_HOSTID",), "", "what NCCL takes for this host: ranks of one may not share a GPU"
)
NCCL_CONF_FILE = Variable(
    ("NCCL_CONF_FILE",), "", "NCCL's settings, from 2.23 on; default: ~/.nccl.conf"
)
NCCL_MULTI_RANK_GPU_ENABLE = Variable(
    ("NCCL_MULTI_RANK_GPU_ENABLE",), "0", "1: NCCL, from 2.30 on, takes several ranks on one GPU"
)
NO_COLOR = Variable(("NO_COLOR",), "", "anything: cydistrun uses no colours")
TERM = Variable(("TERM",), "dumb", "what the terminal can do; dumb: no colours, no redrawing")


DEBUG_LEVELS = ("OFF", "INFO", "DETAIL")
_chosen_level: str | None = None


def debug_level() -> str:
    """Return OFF, INFO or DETAIL: what the program has chosen, else CYDIST_DEBUG. Raises ValueError
    for anything else there."""
    if _chosen_level is not None:
        return _chosen_level
    level = DEBUG.get().strip().upper()
    if level not in DEBUG_LEVELS:
        raise ValueError(
            f"CYDIST_DEBUG, or TORCH_DISTRIBUTED_DEBUG, is {DEBUG.get()!r}: it must be OFF, INFO "
            "or DETAIL"
        )
    return level


def choose_debug_level(level: str | None) -> None:
    """Set the level of this process, whatever the environment says; None: what it says."""
    global _chosen_level
    _chosen_level = level


def check_retired() -> None:
    """Raise ValueError if a setting is on that cydist does not have: to ignore it would leave the
    job less protected than the user expects."""
    if Variable(("CYDIST_TLS",), "", "").is_on():
        raise ValueError(
            "cydist has no setting CYDIST_TLS: CYDIST_ENCRYPT=1 on every rank encrypts the "
            "connections between ranks. Unset CYDIST_TLS"
        )
