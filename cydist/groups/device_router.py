"""A group with a backend for each kind of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from cydist.groups.process_group import ProcessGroup


class DeviceRouter(ProcessGroup):
    """One group per kind of memory: "cpu:tcp,cuda:nccl"."""

    def __init__(self, by_device: dict[str, ProcessGroup], name: str) -> None:
        first = next(iter(by_device.values()))
        super().__init__(
            first.rank(), first.size(), timeout=first.timeout, name=name, ranks=first.ranks,
            backend=",".join(f"{device}:{group.backend}" for device, group in by_device.items()),
        )  # fmt: skip
        self._first = first
        self.by_device = by_device
        self.devices = tuple(by_device)
        on_gpu = by_device.get("cuda")
        self.fast_streams = None if on_gpu is None else on_gpu.fast_streams
        parts = self.backend_groups()
        self.splits_with_all = all(g.splits_with_all or g.splits_without_peers for g in parts)

    def for_device(self, device: str) -> ProcessGroup:
        super().for_device(device)
        return self.by_device[device].for_device(device)

    def as_host_group(self) -> ProcessGroup:
        return self.by_device["cpu"] if "cpu" in self.by_device else self._first.as_host_group()

    def backend_groups(self) -> tuple[ProcessGroup, ...]:
        return tuple(dict.fromkeys(self.by_device.values()))

    def announce_request(self, name: str, backend: str) -> None:
        for group in self.backend_groups():
            group.announce_request(name, backend)

    def peer_requests(self, name: str, ranks: Sequence[int]) -> dict[int, str]:
        return {
            rank: said
            for g in self.backend_groups()
            for rank, said in g.peer_requests(name, ranks).items()
        }

    def split(
        self, parts: Sequence[Sequence[int]], name: str, timeout: float
    ) -> ProcessGroup | None:
        mine = next((part for part in parts if self._rank in part), None)
        made: dict[ProcessGroup, ProcessGroup | None] = {}
        try:
            for part in self.backend_groups():
                if part.splits_with_all:
                    made[part] = part.split(parts, name, timeout)
                elif mine is not None:
                    made[part] = part.subgroup(mine, name, timeout)
        except BaseException:
            for group in made.values():
                if group is not None:
                    group.destroy()
            raise
        if mine is None:
            return None
        by_device = {device: made[part] for device, part in self.by_device.items()}
        return DeviceRouter(
            {device: group for device, group in by_device.items() if group is not None}, name
        )

    def renumber(self, ranks: Sequence[int]) -> None:
        super().renumber(ranks)
        for group in self.backend_groups():
            group.renumber(ranks)

    def shrink(
        self,
        excluded: Sequence[int],
        deadline: float,
        *,
        abort: bool = False,
        pg_options: object = None,
    ) -> ProcessGroup:
        """Shrink part by part. Each part also excludes the ranks that earlier parts excluded."""
        out = {self.ranks[rank] for rank in excluded}
        made: dict[ProcessGroup, ProcessGroup] = {}
        for part in self.backend_groups():
            left = [rank for rank, name in enumerate(part.ranks) if name in out]
            made[part] = part.shrink(left, deadline, abort=abort, pg_options=pg_options)
            out = set(self.ranks) - set(made[part].ranks)
        for part, group in made.items():  # a rank may have died meanwhile
            if dead := [rank for rank, name in enumerate(group.ranks) if name in out]:
                made[part] = group.shrink(dead, deadline, pg_options=pg_options)
                group.destroy()
        by_device = {device: made[part] for device, part in self.by_device.items()}
        return DeviceRouter(by_device, next(iter(made.values())).group_name)

    @contextmanager
    def coalesced(self) -> Iterator[None]:
        with ExitStack() as stack:
            for group in self.backend_groups():
                stack.enter_context(group.coalesced())
            yield

    def fail(self, error: BaseException, call: str = "") -> None:
        super().fail(error, call)
        for group in self.by_device.values():
            group.fail(error, call)

    def abort(self) -> None:
        for group in self.by_device.values():
            group.abort()

    def leave_job(self, now: float) -> None:
        for group in self.by_device.values():
            group.leave_job(now)

    def close(self) -> None:
        with ExitStack() as leaving:
            for group in self.by_device.values():
                leaving.callback(group.destroy)
