"""Reduction operations that were pickled, by this cydist or by an earlier one."""

from __future__ import annotations

import pickle

import pytest

import cydist as dist

# As cydist wrote them while they were defined in cydist.types.
EARLIER = {
    "SUM": b"\x80\x04\x95$\x00\x00\x00\x00\x00\x00\x00\x8c\x0ccydist.types\x94\x8c\tRedOpType\x94"
    b"\x93\x94K\x01\x85\x94R\x94.",
    "PREMUL_SUM": b"\x80\x04\x95:\x00\x00\x00\x00\x00\x00\x00\x8c\x0ccydist.types\x94\x8c\t"
    b"PremulSum\x94\x93\x94)\x81\x94N}\x94\x8c\x06factor\x94G@\x00\x00\x00\x00\x00\x00\x00s\x86"
    b"\x94b.",
}
OPERATIONS = {"SUM": dist.ReduceOp.SUM, "PREMUL_SUM": dist.ReduceOp.PREMUL_SUM(2.0)}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_that_was_pickled_loads(name: str) -> None:
    """It is the same operation, wherever its class is defined now."""
    for data in (EARLIER[name], pickle.dumps(OPERATIONS[name])):
        assert repr(pickle.loads(data)) == repr(OPERATIONS[name])
