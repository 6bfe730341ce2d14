"""MPI refuses a later part of something whose first it has taken: an error, and the memory stays
as long as MPI may use it.
"""

import ctypes

import numpy as np
import pytest

import cydist as dist
from cydist._native import libmpi

OTHER = 16  # some error's code, in Open MPI and in MPICH
PIECE_BYTES = 1 << 16  # that one call of MPI moves
LONG = 12_000  # float64 elements that take two

pointer_in, name_of = ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_GetName
pointer_in.restype, pointer_in.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
name_of.restype, name_of.argtypes = ctypes.c_char_p, (ctypes.py_object,)

# How many arguments a function has, and which of them is the number of elements.
ARGUMENTS = {b"MPI_Isend": (7, 1), b"MPI_Irecv": (7, 1), b"MPI_Ireduce": (8, 2)}


@pytest.fixture
def refuse():
    """Let a function of MPI refuse what has so many elements."""
    capsule = libmpi.__pyx_capi__["lib"]
    address = pointer_in(capsule, name_of(capsule))
    table = (ctypes.c_void_p * len(libmpi.NAMES)).from_address(address)
    before, doubles = list(table), []

    def replace(name, elements):
        place, (arguments, which) = libmpi.NAMES.index(name), ARGUMENTS[name]
        kind = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_size_t] * arguments)
        real = kind(before[place])

        def double(*given):
            return OTHER if given[which] & 0xFFFFFFFF == elements else real(*given)

        doubles.append(kind(double))
        table[place] = ctypes.cast(doubles[-1], ctypes.c_void_p).value

    yield replace
    table[:] = before


@pytest.fixture
def pieces(group):
    """One call of MPI moves PIECE_BYTES, and not 1 GiB."""
    messages = group._endpoint.messages
    dist.barrier(group)
    before, messages.piece_bytes = messages.piece_bytes, PIECE_BYTES
    dist.barrier(group)
    yield
    messages.piece_bytes = before


@pytest.fixture
def goes_on(group):
    """MPI goes on with one more, in memory that is kept for it."""
    messages = group._endpoint.messages
    before = messages.lingering
    return lambda: messages.lingering == before + 1


def test_a_receive_goes_on_whose_other_message_mpi_refuses(rank, spare, refuse, goes_on):
    """Two ranks exchange blocks by a message each way: the first is on its way by then."""
    group = dist.new_group([0, 1])
    if rank < 2:
        dist.barrier(group)
    if rank == 0 and not group.windows:
        refuse(b"MPI_Isend", 8 * LONG)
        with pytest.raises(dist.PeerFailedError):
            dist.all_gather_into_tensor(np.zeros(2 * LONG), np.ones(LONG), group)
        assert goes_on()
    dist.barrier(spare)
    dist.destroy_process_group(group)


def test_a_collective_goes_on_whose_later_piece_mpi_refuses(
    group, rank, pieces, spare, refuse, goes_on
):
    """MPI may still write what comes of the first one."""
    group._endpoint.messages.piece_bytes = 1 << 10
    if rank == 0 and not group.windows:
        refuse(b"MPI_Ireduce", 72)
        with pytest.raises(dist.PeerFailedError):
            dist.reduce(np.ones(128 + 72), 0, group=group)
        assert goes_on()
    dist.barrier(spare)


def test_a_receive_goes_on_whose_later_piece_mpi_refuses(
    group, rank, pieces, spare, refuse, goes_on
):
    """Its sender announces it and sends nothing: the first piece is on its way for ever."""
    if group.windows:
        return  # no message goes by MPI
    if rank == 1:
        refuse(b"MPI_Isend", PIECE_BYTES)
        work = dist.isend(np.ones(LONG), 0, group)
    if rank == 0:
        refuse(b"MPI_Irecv", 8 * LONG - PIECE_BYTES)
        with pytest.raises(dist.PeerFailedError):
            dist.recv(np.ones(LONG), 1, group)
        assert goes_on()
    dist.barrier(spare)
    if rank == 1:
        with pytest.raises(dist.DistError):
            work.wait()
    dist.barrier(spare)


def test_a_send_goes_on_whose_later_piece_mpi_refuses(group, rank, pieces, spare, refuse, goes_on):
    """Until its receiver has taken the first piece. About the other one MPI is not asked, which
    Open MPI does not survive."""
    if group.windows:
        return  # no message goes by MPI
    if rank == 0:
        refuse(b"MPI_Isend", 8 * LONG - PIECE_BYTES)
        with pytest.raises(dist.PeerFailedError):
            dist.send(np.ones(LONG), 1, group)
        assert goes_on()
    dist.barrier(spare)
    if rank == 1:
        with pytest.raises(dist.DistError):
            dist.recv(np.ones(LONG), 0, group)
    dist.barrier(spare)


def test_nothing_goes_on_of_what_mpi_refuses_whole(rank, spare, refuse, goes_on):
    """Then its memory is free at once."""
    group = dist.new_group([0, 1])
    if rank < 2:
        dist.barrier(group)
    if rank == 0 and not group.windows:
        refuse(b"MPI_Irecv", 8 * LONG)
        with pytest.raises(dist.PeerFailedError):
            dist.all_gather_into_tensor(np.zeros(2 * LONG), np.ones(LONG), group)
        assert not goes_on()
    dist.barrier(spare)
    dist.destroy_process_group(group)
