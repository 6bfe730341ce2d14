"""Start `rank` without the rest of cydist, by path, in any Python with numpy and mpi4py.

mpirun -n 2 PYTHON mpi_start.py ADDRESS LOG mpi '{}'
"""

import json
import sys
from pathlib import Path
from types import ModuleType

if __name__ == "__main__":
    # The package without its __init__, which imports compiled code made for another Python.
    package = ModuleType("cydist")
    package.__path__ = [str(Path(__file__).resolve().parent.parent)]
    sys.modules["cydist"] = package
    sys.path.pop(0)  # this folder, whose modules are not to be found by their bare names
    from cydist.bench.rank import main

    main(sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
