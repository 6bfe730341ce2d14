"""Any backend of torch.distributed as a backend of cydist: "torch:gloo", "torch:NAME".

So one program can run on both and compare them. Naming such a backend imports torch.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from cydist.errors import UnsupportedError

if TYPE_CHECKING:
    from cydist.groups.process_group import ProcessGroup
    from cydist.groups.registry import BackendOptions


class TorchBackend:
    """Makes groups of torch's backend `name`."""

    extended_api = True
    devices = ("cpu",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, options: BackendOptions, pg_options: object = None) -> ProcessGroup:
        from cydist.backends.torch import create

        return create.create(self.name, options, pg_options)


def member(name: str) -> TorchBackend:
    """Return the creator of groups of "torch:name".

    Raises UnsupportedError without torch, and for a backend that does not take CPU memory;
    ValueError for one that torch does not have.
    """
    if importlib.util.find_spec("torch") is None:
        raise UnsupportedError(f"backend 'torch:{name}' needs torch: pip install torch")
    from cydist.backends.torch import create

    create.check(name)
    return TorchBackend(name)
