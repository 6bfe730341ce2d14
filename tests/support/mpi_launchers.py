"""The MPIs that tests start jobs with."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# What an mpirun needs on a machine with few cores, in a container.
TOLERANT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}


def binaries(name: str) -> Path:
    """Where the mpirun and the python of an MPI are."""
    path = ROOT / f".venv-{name}/bin"
    if not path.exists():
        pytest.skip(f"no .venv-{name}: scripts/test-mpi makes it")
    return path
