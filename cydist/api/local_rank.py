"""The launcher's data about this process: its number on the host, and whether it was torchrun."""

from __future__ import annotations

import os

from cydist.rendezvous import launcher_env


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return this process's number among those of its host, as its launcher counts them.

    Programs choose their GPU by it. It needs no default group.

    Args:
        fallback_rank: The result where the launcher does not say it.

    Returns:
        0 to the number of the host's ranks - 1.

    Raises:
        RuntimeError: The launcher does not say it, and there is no `fallback_rank`.

    Examples:
        >>> assert dist.get_node_local_rank(fallback_rank=0) in (0, 1)
    """
    local_rank = launcher_env.placement().local_rank
    if local_rank is not None:
        return local_rank
    if fallback_rank is not None:
        return int(fallback_rank)
    raise RuntimeError(
        "get_node_local_rank: no launcher has set LOCAL_RANK, or a variable of its own such as "
        "SLURM_LOCALID: give fallback_rank=0 for a program of one process"
    )


def is_torchelastic_launched() -> bool:
    """Return whether torchrun started this process, or cydistrun, which sets the same variables.

    Returns:
        True or False.

    Examples:
        >>> dist.is_torchelastic_launched()
        True
    """
    return "TORCHELASTIC_RUN_ID" in os.environ
