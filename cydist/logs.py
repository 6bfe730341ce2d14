"""Log lines on Python's `logging`: one logger below `cydist` for each subject.

Each record has two attributes more: `rank`, the global rank, -1 before it is known, and `host`.
Nothing is shown unless the program adds a handler, or CYDIST_LOG asks for one.

`logging` is imported with the first line that may be read. It takes a tenth of the time of
`import cydist`, and before the program has imported it, the program has no handler.
"""

from __future__ import annotations

import os
import sys
import threading
from functools import cache
from typing import TYPE_CHECKING, Any

from cydist import config

if TYPE_CHECKING:
    import logging

ROOT = "cydist"
INFO, DEBUG = 20, 10  # logging's numbers
LEVELS = ("off", "error", "warning", "info", "debug")
LINE = (
    "%(asctime)s.%(msecs)03d %(levelname)s %(name)s, rank %(rank)d on %(host)s (process "
    "%(process)d): %(message)s"
)

_process_rank = -1
_of_thread = threading.local()
_installed: tuple[tuple[str, str], logging.Handler | None] = ("", ""), None


class Log:
    """The logger of one subject, found when it is first needed.

    Args:
        subject: "connections": the logger is then called `cydist.connections`.
    """

    __slots__ = ("_logger", "_name")

    def __init__(self, subject: str) -> None:
        self._name = f"{ROOT}.{subject}"
        self._logger: logging.Logger | None = None

    def shows(self, level: int) -> bool:
        """Return whether lines of this level may be read: for text that takes time to make."""
        logger = self._logger or self._find()
        return logger is not None and logger.isEnabledFor(level)

    def info(self, text: str, *arguments: object) -> None:
        """Log a choice that was made once, with `%` between text and arguments."""
        self._write(INFO, text, arguments)

    def debug(self, text: str, *arguments: object) -> None:
        """Log a step, or a fallback and its reason."""
        self._write(DEBUG, text, arguments)

    def _write(self, level: int, text: str, arguments: tuple[object, ...]) -> None:
        if self.shows(level):
            assert self._logger is not None
            self._logger.log(level, text, *arguments, extra=_origin(), stacklevel=3)

    def _find(self) -> logging.Logger | None:
        if "logging" not in sys.modules:
            return None
        import logging

        root = logging.getLogger(ROOT)
        if not root.handlers:
            root.addHandler(logging.NullHandler())
        self._logger = logging.getLogger(self._name)
        return self._logger


def thread_is_rank() -> None:
    """Let the lines of this thread name a rank of its own from now on."""
    if rank_of_thread() is None:
        _of_thread.rank = -1


def use_rank(rank: int) -> None:
    """Name this global rank in the lines from now on: in those of the process, or of this thread
    if it is a rank of its own."""
    global _process_rank
    if rank_of_thread() is None:
        _process_rank = rank
    else:
        _of_thread.rank = rank


def rank_of_thread() -> int | None:
    """Return the rank of a thread that is a rank of its own, -1 before it is known; None: the
    process is the rank."""
    rank: int | None = getattr(_of_thread, "rank", None)
    return rank


def follow(rank: int | None) -> None:
    """Name in the lines of this thread what `rank_of_thread` returned in the one that started
    it."""
    if rank is not None:
        _of_thread.rank = rank


def _origin() -> dict[str, object]:
    rank = getattr(_of_thread, "rank", _process_rank)
    return {"rank": rank, "host": os.uname().nodename}


def add_rank(record: logging.LogRecord) -> bool:
    """Add the attributes `rank` and `host` to a record of `logging`, for formats with %(rank)d.

    cydist's own records have them. Make this function a filter of your handler, so that your own
    records have them, too.

    Args:
        record: Any record.

    Returns:
        True: the record is shown.

    Examples:
        >>> import logging
        >>> handler = logging.StreamHandler()
        >>> handler.addFilter(dist.add_rank)
        >>> handler.setFormatter(logging.Formatter("rank %(rank)d: %(message)s"))
    """
    if not hasattr(record, "rank"):
        vars(record).update(_origin())
    return True


def setting() -> tuple[str, str]:
    """Return the level of the log lines to write, as `logging` names it, and the file for them.

    Returns "", "" where none are asked for; the file is "" for stderr. Raises ValueError for
    anything else in CYDIST_LOG than its values, and as `config.debug_level`.
    """
    given = config.LOG.get().strip()
    if not given:
        # torch's table: without INFO its other variable changes nothing. A value that torch does
        # not know is reported by torch.
        if config.TORCH_LOG_LEVEL.get().strip().upper() not in ("INFO", "0"):
            return "", ""
        return ("INFO" if config.debug_level() == "OFF" else "DEBUG"), ""
    level, colon, path = given.partition(":")
    level = level.strip().lower()
    if level not in LEVELS or (colon and not path.strip()):
        raise ValueError(
            f"{config.LOG.names[0]}={given!r}: it must be one of {', '.join(LEVELS)}, or one of "
            "these and a file, as in debug:/tmp/job.log"
        )
    return ("", "") if level == "off" else (level.upper(), path.strip())


def configure() -> None:
    """Add the handler that CYDIST_LOG, or torch's variables in its place, ask for; take an earlier
    one away if they have changed.

    Raises ValueError if CYDIST_LOG is none of its values, or its file cannot be opened.
    """
    global _installed
    wanted = setting()
    before, handler = _installed
    if wanted == before:
        return
    level, path = wanted
    made = _handler_class()(path) if level else None
    import logging

    root = logging.getLogger(ROOT)
    if handler is not None:
        root.removeHandler(handler)
        handler.close()
    if made is not None:
        made.setFormatter(logging.Formatter(LINE, "%Y-%m-%dT%H:%M:%S"))
        made.addFilter(add_rank)
        made.setLevel(level)
        root.addHandler(made)
    root.setLevel(level or logging.NOTSET)
    _installed = wanted, made


@cache
def _handler_class() -> Any:
    """Return the class of CYDIST_LOG's handler. Made at first use: its base is slow to import."""
    import logging

    class LineHandler(logging.Handler):
        """Write each line at once, so that lines of several processes do not mix.

        Args:
            path: Of a file that lines are appended to; "": stderr.
        """

        def __init__(self, path: str) -> None:
            super().__init__()
            self._file = None
            if not path:
                return
            named = path.replace("%h", os.uname().nodename).replace("%p", str(os.getpid()))
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            try:
                self._file = os.open(named, flags, 0o600)
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"{config.LOG.names[0]}={config.LOG.get()!r}: the file cannot be opened: "
                    f"{error}"
                ) from None

        def emit(self, record: logging.LogRecord) -> None:
            try:
                line = self.format(record) + "\n"
                if self._file is None:
                    sys.stderr.write(line)
                    sys.stderr.flush()
                else:
                    os.write(self._file, line.encode(errors="backslashreplace"))
            except Exception:
                self.handleError(record)

        def close(self) -> None:
            super().close()
            file, self._file = self._file, None
            if file is not None:
                os.close(file)

    return LineHandler
