"""`python -m cydist.deprecated.launch`: the first documents' name of `python -m cydist.launch`."""

from __future__ import annotations

import sys

from cydist.launch.__main__ import main

if __name__ == "__main__":
    sys.exit(main(passes_local_rank=True))
