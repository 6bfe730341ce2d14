"""Host names to addresses, in bounded time: the system's resolver has no deadline."""

from __future__ import annotations

import socket
import threading
import time

from cydist.executor import THREADS
from cydist.waiting import wait_for

# How long a name service may take where nobody says otherwise, in seconds.
PATIENCE = 10.0

# As getaddrinfo gives them: family, kind, protocol, canonical name, address.
Resolved = tuple[int, int, int, str, tuple[str, int]]


def resolve(
    host: str, port: int, deadline: float | None = None, family: int = socket.AF_UNSPEC
) -> list[Resolved]:
    """The addresses of `host`, a name or an address itself, for TCP.

    deadline   on time.monotonic(); None: in PATIENCE seconds

    Raises OSError when it has none, TimeoutError when the name service does not answer in time.
    """
    bare = host.strip("[]")
    try:
        return _ask(bare, port, family, socket.AI_NUMERICHOST)
    except (socket.gaierror, UnicodeError):
        pass  # a name, or nothing at all
    answers: list[list[Resolved] | OSError] = []
    answered = threading.Event()

    def ask() -> None:
        try:
            answers.append(_ask(bare, port, family, 0))
        except OSError as error:
            answers.append(error)
        except UnicodeError as error:  # what no name can be
            answers.append(OSError(str(error)))
        answered.set()

    THREADS.run(ask)
    limit = PATIENCE if deadline is None else max(0.0, deadline - time.monotonic())
    if not wait_for(answered, limit):
        raise TimeoutError(f"the name service did not resolve {host!r} within {limit:.3g} s")
    (answer,) = answers
    if isinstance(answer, OSError):
        raise answer
    return answer


def _ask(host: str, port: int, family: int, flags: int) -> list[Resolved]:
    # Bytes, where they say it: text goes through Python's own tables of all the world's letters.
    name = host.encode() if host.isascii() else host
    kind = socket.SOCK_STREAM
    return socket.getaddrinfo(name, port, family, kind, 0, flags)  # type: ignore[return-value]
