"""cydist as a backend of torch.distributed.

import torch.distributed as dist
import cydist.interop.torch
dist.init_process_group("cydist")

An installed cydist needs no import: `import torch` finds its entry point. docs/guide/torch.md says
what works, and what does not.
"""

from cydist.interop.torch.bootstrap import create, register
from cydist.interop.torch.group import Group

__all__ = ["Group", "create", "register"]

register()
