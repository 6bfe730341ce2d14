"""What `import torch` runs of cydist: its entry point in "torch.backends".

It makes the name "cydist" known to torch.distributed and imports nothing of cydist: that
happens when the first group is made. A module beside the package, since to import one inside
it would import cydist wherever torch is used.
"""

from typing import Any


def register() -> None:
    """Make "cydist" a backend of torch.distributed, where torch was built with that."""
    import torch.distributed as dist

    if dist.is_available():
        devices = ["cpu", "cuda"]
        dist.Backend.register_backend("cydist", create, extended_api=True, devices=devices)


def create(options: Any, pg_options: object = None) -> Any:
    """Make a group, by what cydist.interop.torch registers in this function's place."""
    from cydist.interop import torch

    return torch.create(options, pg_options)
