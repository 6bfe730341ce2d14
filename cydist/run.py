"""`python -m cydist.run`: cydistrun, as `python -m torch.distributed.run` is torchrun."""

from __future__ import annotations

import sys

from cydist.launch.__main__ import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
