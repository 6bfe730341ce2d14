"""Rendezvous: the ranks of a job find each other.

`cydist.rendezvous` is the function of that name, as in torch.distributed, and this package is what
`from cydist.rendezvous import ...` imports from.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cydist.stores import Store


def rendezvous(
    url: str,
    rank: int = -1,
    world_size: int = -1,
    *,
    timeout: float | timedelta | None = None,
    group_name: str = "",
) -> Iterator[tuple[Store, int, int]]:
    """Meet the other ranks of a job, and make no group yet.

    Every rank calls this and takes the triple, which waits for all of them. The triple can then be
    given to init_process_group.

    Args:
        url: "env://", "tcp://host:port", "file:///path" or one with a scheme of
            register_rendezvous_handler, as `init_method` of init_process_group.
        rank: This process's rank; -1: the URL or the environment says it.
        world_size: The number of ranks; -1 likewise.
        timeout: Seconds or a timedelta to wait for all ranks; None: 30 minutes.
        group_name: Separates jobs that share an address or a file.

    Returns:
        An iterator over one triple: a store that all ranks reach, the rank, the number of ranks.

    Raises:
        TypeError: The URL is no string, at the call.
        ValueError: The URL begins with no known scheme, at the call. Or arguments are missing or
            contradictory, which is an error when the triple is taken, as all others.
        RendezvousError: Ranks are missing at the timeout; the message names them.
        AuthenticationError: The ranks do not share one secret.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     url = f"file://{directory}/meeting"
        ...     store, here, size = next(dist.rendezvous(url, rank=0, world_size=1))
        >>> here, size
        (0, 1)
    """
    if not isinstance(url, str):
        raise TypeError(f"rendezvous: url must be a string such as 'env://', not {url!r}")
    from cydist.rendezvous.handlers import known_url  # sockets, which few programs need here

    known_url(url)
    return _met(url, rank, world_size, timeout, group_name)


def _met(
    url: str, rank: int, world_size: int, timeout: float | timedelta | None, group_name: str
) -> Iterator[tuple[Store, int, int]]:
    from cydist.rendezvous import handlers
    from cydist.waiting import DEFAULT_TIMEOUT

    limit = DEFAULT_TIMEOUT if timeout is None else timeout
    yield handlers.rendezvous(
        url, rank=rank, world_size=world_size, timeout=limit, group_name=group_name
    )


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name != "register_rendezvous_handler":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from cydist.rendezvous.handlers import register_rendezvous_handler

        return register_rendezvous_handler
