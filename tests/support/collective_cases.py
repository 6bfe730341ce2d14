"""Ranks that are threads, and a collective on them with its right result."""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from wire_peer import KEYS

from cydist import _native
from cydist._native import kernels
from cydist.backends.host.group import choose_for_part
from cydist.testing import oracle
from cydist.tuning import table as tuning_table

EVEN = _native.FLAG_BITS["EVEN"]
TINY = 24  # bytes: a few elements
SLOTS = 4
SLOT_BYTES = 512


class Ranks:
    """Threads that are the ranks of one group over links of one kind.

    Args:
        hosts: The host of each rank; None: they are on one. Ranks on different hosts share no
            memory, whatever the transport. Over "inproc" those on one host exchange messages, too.
        unconnected: Pairs of ranks, the lower one first, that get no connection.
    """

    def __init__(self, size, transport, hosts=None, unconnected=()):
        self.size = size
        self.seq = 0
        self.unconnected = unconnected
        self.hosts = hosts or [0] * size
        self.transport = transport
        self.links = self._link(transport)
        self.groups = [
            _native.Group(self.links[rank], list(range(size)), rank, 1) for rank in range(size)
        ]
        self.pool = ThreadPoolExecutor(size)
        if hosts is not None:
            self.each(self._place)

    def _place(self, rank):
        group = self.groups[rank]
        group.place_on_hosts(self.hosts)
        if self.transport != "inproc":  # whose windows are of whole groups
            group.open_windows(time.monotonic_ns() + int(30e9))
        if group.hosts:
            group.prepare_parts(choose_for_part, lambda ranks, windows: 4096)

    def _link(self, transport):
        if transport == "inproc":
            hub = _native.hub(
                f"algorithms {id(self)}", self.size, slots=SLOTS, slot_bytes=SLOT_BYTES
            )
            return [_native.InprocLink(hub, rank) for rank in range(self.size)]
        links = [_native.TcpLink(rank, self.size) for rank in range(self.size)]
        for low in range(self.size):
            for high in range(low + 1, self.size):
                if (low, high) in self.unconnected:
                    continue
                ours, theirs = socket.socketpair()
                links[low].adopt(high, 0, ours.detach(), *KEYS)
                links[high].adopt(low, 0, theirs.detach(), *KEYS[::-1])
        if transport == "shm":
            for host in set(self.hosts):
                self._share([rank for rank in range(self.size) if self.hosts[rank] == host], links)
        return links

    def _share(self, sharers, links):
        """Let these ranks share memory."""
        token = bytes(32)
        memory = [_native.SharedMemory.create(len(sharers), len(sharers) << 24, token, 1 << 20)]
        for _ in sharers[1:]:
            memory.append(_native.SharedMemory.attach(os.dup(memory[0].fd), token))
        for rank, each in zip(sharers, memory, strict=True):
            links[rank] = _native.ShmLink(links[rank], each, dict.fromkeys(sharers, os.getpid()))

    def each(self, body):
        """body(rank) on every rank at once; what they return."""
        return [f.result(60) for f in [self.pool.submit(body, r) for r in range(self.size)]]

    def run(self, case, name, *, segment=TINY, seconds=30.0):
        """Run a case on every rank; the outputs by rank."""
        self.seq = (self.seq + 1) % (1 << 64)
        return self.each(
            lambda rank: case.run(self.groups[rank], rank, name, self.seq, segment, seconds)
        )

    def close(self):
        """End groups, links and threads."""
        for group in self.groups:
            group.close()
        self.each(lambda rank: self.links[rank].close())  # each waits for the others' last bytes
        self.pool.shutdown()


class Case:
    """One collective call as every rank makes it: inputs, outputs, and what must come out.

    Args:
        sizes: Elements of the blocks: one number, or a list where blocks are uneven, or a matrix
            (who sends, who receives) for all_to_all.
        op: A name of kernels.OPS.
        values: values(rank, count, salt): contributions.
    """

    def __init__(
        self, collective, p, count, *, dtype="float32", op="SUM", factor=None, root=0,
        sizes=None, values=None, in_place=False,
    ):  # fmt: skip
        self.collective, self.p, self.count, self.root = collective, p, count, root
        self.dtype = oracle.DTYPES[dtype]
        self.op = op if collective in tuning_table.REDUCING else None
        self.factor = factor
        self.even = sizes is None
        self.in_place = in_place
        self.sizes = sizes if sizes is not None else [count] * p
        values = values or (lambda rank, n, salt: oracle.contribution(rank + salt, n, self.dtype))
        self.given = [
            [values(rank, n, 5 * i).astype(self.dtype) for i, n in enumerate(self.gives(rank))]
            for rank in range(p)
        ]

    def gives(self, rank):
        """Sizes of a rank's inputs."""
        match self.collective:
            case "barrier":
                return []
            case "reduce_scatter":
                return self.sizes
            case "all_gather" | "gather":
                return [self.sizes[rank]]
            case "scatter":
                return self.sizes if rank == self.root else []
            case "all_to_all":
                return [self.count] * self.p if self.even else self.sizes[rank]
        return [self.count]

    def gets(self, rank):
        """Sizes of a rank's outputs."""
        match self.collective:
            case "barrier":
                return []
            case "all_gather":
                return self.sizes
            case "gather":
                return self.sizes if rank == self.root else []
            case "reduce":
                return [self.count] if rank == self.root else []
            case "scatter" | "reduce_scatter":
                return [self.sizes[rank]]
            case "all_to_all":
                return [self.count] * self.p if self.even else [row[rank] for row in self.sizes]
        return [self.count]

    def expected(self, rank):
        """The outputs of a rank; None where they are not defined."""
        given = self.given
        match self.collective:
            case "broadcast":
                return given[self.root]
            case "all_reduce":
                return [self.reduced([blocks[0] for blocks in given])]
            case "reduce":
                return [self.reduced([b[0] for b in given])] if rank == self.root else []
            case "all_gather":
                return [blocks[0] for blocks in given]
            case "gather":
                return [blocks[0] for blocks in given] if rank == self.root else []
            case "scatter":
                return [given[self.root][rank]]
            case "reduce_scatter":
                return [self.reduced([blocks[rank] for blocks in given])]
            case "all_to_all":
                return [given[peer][rank] for peer in range(self.p)]
            case "barrier":
                return []
            case "scan":
                return [self.reduced([blocks[0] for blocks in given[: rank + 1]])]
            case "exscan":
                return [self.reduced([b[0] for b in given[:rank]])] if rank else None
        raise AssertionError(self.collective)

    def reduced(self, arrays):
        """What the operation gives, in rank order with one rounding."""
        if self.op == "PREMUL_SUM":
            arrays = [array * array.dtype.type(self.factor) for array in arrays]
            return oracle.reduced("SUM", arrays)
        return oracle.reduced(self.op, arrays)

    def fallback(self, name):
        """The algorithm that takes the call where this one finds that it cannot."""
        return tuning_table.fallback(
            self.collective, name, self.count * 4, self.p, even=self.even, commutative=True
        )  # fmt: skip

    def run(self, group, rank, name, seq, segment, seconds):
        """Make the call on one rank; its outputs. Inputs must not change, unless in place."""
        inputs = [array.copy() for array in self.given[rank]]
        outputs = [np.full(n, 77, self.dtype) for n in self.gets(rank)]
        if self.collective == "broadcast":
            inputs = outputs = inputs if rank == self.root else outputs
        elif self.in_place and self.collective in ("all_gather", "gather") and outputs:
            outputs[rank][:] = inputs[0]
            inputs[0] = outputs[rank]
        elif self.in_place and self.collective in ("scatter", "reduce_scatter") and inputs:
            outputs[0] = inputs[rank]
        elif self.in_place and outputs and self.collective != "scatter":
            outputs = inputs[:1]
        group.run(
            self.collective,
            [_native.asarray(array) for array in inputs],
            [_native.asarray(array) for array in outputs],
            algorithm=name.encode(),
            fallback=self.fallback(name).encode(),
            deadline_ns=time.monotonic_ns() + int(seconds * 1e9),
            seq=seq,
            op=kernels.OPS[self.op] if self.op else 0,
            factor=self.factor,
            root=self.root if self.collective in ROOTED else -1,
            count=self.count if self.even else 0,
            flags=EVEN if self.even else 0,
            segment_bytes=segment,
        )
        if not self.in_place and self.collective != "broadcast":
            assert all(map(oracle.same_bits, self.given[rank], inputs)), "inputs have changed"
        return outputs

    def check(self, results):
        """Assert that every rank has what it should, bit for bit."""
        for rank, outputs in enumerate(results):
            expected = self.expected(rank)
            if expected is None:
                continue
            assert len(expected) == len(outputs)
            for block, (want, got) in enumerate(zip(expected, outputs, strict=True)):
                assert oracle.same_bits(want, got), (
                    f"rank {rank}, block {block}: expected {want!r}, got {got!r}"
                )


ROOTED = ("broadcast", "reduce", "gather", "scatter")
