"""Options of the backend, under torch's names."""

from __future__ import annotations

from typing import Any

from cydist.errors import warn_user


class Options:
    """Options for `pg_options` of init_process_group and new_group.

    Args:
        is_high_priority_stream: Asynchronous calls run on a high-priority stream.
    """

    __module__ = "cydist"
    __qualname__ = "ProcessGroupNCCL.Options"

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream

    def __repr__(self) -> str:
        return f"ProcessGroupNCCL.Options(is_high_priority_stream={self.is_high_priority_stream})"


class ProcessGroupNCCL:
    """torch.distributed's name space of the options of backend "nccl".

    Examples:
        >>> options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    """

    __module__ = "cydist"

    Options = Options


def high_priority(pg_options: Any) -> bool:
    """Return whether these options, cydist's or torch's, ask for a high priority.

    Raises TypeError for anything else. Warns of a `config` of torch, which is not passed to NCCL.
    """
    if pg_options is None:
        return False
    wanted = getattr(pg_options, "is_high_priority_stream", None)
    if wanted is None:
        raise TypeError(
            "pg_options of backend 'nccl' must be ProcessGroupNCCL.Options(...), not "
            f"{pg_options!r:.80}"
        )
    if changed := _changed(getattr(pg_options, "config", None)):
        warn_user(
            f"backend 'nccl' ignores pg_options.config ({', '.join(changed)}): set NCCL's "
            "environment variables instead"
        )
    return bool(wanted)


def _changed(config: Any) -> list[str]:
    """Return which fields the user has set of a NCCLConfig of torch."""
    if config is None:
        return []
    try:
        fresh = type(config)()
        names = [name for name in dir(config) if not name.startswith("_")]
        values = [(name, getattr(config, name), getattr(fresh, name)) for name in names]
    except Exception:  # of a torch whose fields cannot be compared
        return []
    return [name for name, value, default in values if not callable(value) and value != default]
