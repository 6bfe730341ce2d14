"""Any backend of torch.distributed as one of ours: "torch:gloo", "torch:NAME".

So one program runs on both, and can compare them. torch is imported when such a backend is named.
"""

from __future__ import annotations

import importlib.util
from functools import partial

from cydist.errors import UnsupportedError
from cydist.groups.registry import Plugin


def plugin(name: str) -> Plugin:
    """What "torch:name" means.

    Raises UnsupportedError without torch, and for a backend that takes no CPU memory; ValueError
    for one that torch does not have.
    """
    if importlib.util.find_spec("torch") is None:
        raise UnsupportedError(f"backend 'torch:{name}' needs torch: pip install torch")
    from cydist.backends.torch import create

    create.check(name)
    return Plugin(partial(create.create, name), True, ("cpu",))
