"""Arrays of other libraries: what shows its memory is taken, all else says which call to make."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist._native import asarray

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def world() -> Any:
    """A group of this process alone."""
    dist.init_process_group("tcp", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def jax_array(values: np.ndarray) -> Any:
    import jax.numpy

    return jax.numpy.asarray(values)


def jax_bfloat16(values: np.ndarray) -> Any:
    import jax.numpy

    return jax.numpy.asarray(values, dtype=jax.numpy.bfloat16)


def pandas_series(values: np.ndarray) -> Any:
    import pandas as pd

    return pd.Series(values)


def pandas_frame(values: np.ndarray) -> Any:
    import pandas as pd

    return pd.DataFrame({"a": values})


def pandas_values(values: np.ndarray) -> Any:
    return pandas_series(values).to_numpy()


def polars_series(values: np.ndarray) -> Any:
    import polars as pl

    return pl.Series(values)


def arrow_array(values: np.ndarray) -> Any:
    import pyarrow as pa

    return pa.array(values)


def xarray_array(values: np.ndarray) -> Any:
    import xarray as xr

    values = values.copy()
    values.flags.writeable = False
    return xr.DataArray(values)


VISIBLE = [
    jax_array, jax_bfloat16, pandas_series, pandas_frame, pandas_values, polars_series,
    arrow_array, xarray_array,
]  # fmt: skip


@pytest.fixture(params=VISIBLE, ids=lambda make: make.__name__)
def visible(request: pytest.FixtureRequest) -> Any:
    """An array whose memory can be read."""
    return request.param(np.arange(5, dtype=np.float32))


def test_memory_that_shows_is_read(visible: Any) -> None:
    """As an input, with its dtype."""
    expected = np.asarray(visible)
    received = np.empty((1, *expected.shape), expected.dtype)
    dist.all_gather_into_tensor(received, visible)
    assert received.tobytes() == expected.tobytes()


def test_memory_that_shows_is_not_copied(visible: Any) -> None:
    """Two looks, both kept, find one place."""
    looks = [asarray(visible) for _ in range(2)]
    assert looks[0].address == looks[1].address


def test_what_may_not_change_is_not_written(visible: Any) -> None:
    """The error says that a copy can be; the group stays usable."""
    before = np.asarray(visible).tobytes()
    with pytest.raises(ValueError, match=r"read-only.*a copy made by numpy\.array\(x\)"):
        dist.all_reduce(visible)
    assert np.asarray(visible).tobytes() == before
    dist.barrier()


def nullable() -> Any:
    import pandas as pd

    return pd.array([1, 2, None])


def strings() -> Any:
    import pandas as pd

    return pd.Series(["a", "b"])


def polars_nulls() -> Any:
    import polars as pl

    return pl.Series([1.0, None])


def arrow_nulls() -> Any:
    import pyarrow as pa

    return pa.array([1.0, None])


def arrow_chunks() -> Any:
    import pyarrow as pa

    return pa.chunked_array([[1.0], [2.0]])


def xarray_dataset() -> Any:
    import xarray as xr

    return xr.Dataset({"a": ("x", np.zeros(3))})


def zarr_array() -> Any:
    import zarr

    return zarr.array(np.zeros(3))


def dask_array() -> Any:
    import dask.array

    return dask.array.from_array(np.zeros(6), chunks=3)


def sparse() -> Any:
    import scipy.sparse

    return scipy.sparse.csr_matrix(np.eye(3))


REFUSED = {
    nullable: r"pass its \.to_numpy\(\)", strings: r"pass its \.to_numpy\(\)",
    polars_nulls: r"pass its \.to_numpy\(\)", arrow_nulls: r"pass its \.to_numpy\(",
    arrow_chunks: r"pass its \.to_numpy\(\)", xarray_dataset: r"pass numpy\.asarray of it",
    zarr_array: r"pass numpy\.asarray of it", dask_array: r"pass its \.compute\(\)",
    sparse: r"pass its \.toarray\(\)",
}  # fmt: skip


@pytest.mark.parametrize(
    ("make", "remedy"), REFUSED.items(), ids=lambda each: getattr(each, "__name__", "")
)
def test_what_has_no_memory_of_its_own_says_what_to_pass(make: Any, remedy: str) -> None:
    """Before any traffic; the group stays usable."""
    with pytest.raises(TypeError, match=remedy):
        dist.all_gather_into_tensor(np.empty(6), make())
    dist.barrier()
