"""A group that has a backend for each kind of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from cydist.group import ProcessGroup


class RoutedGroup(ProcessGroup):
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

    def for_device(self, device: str) -> ProcessGroup:
        super().for_device(device)
        return self.by_device[device].for_device(device)

    def on_host(self) -> ProcessGroup:
        return self.by_device["cpu"] if "cpu" in self.by_device else self._first.on_host()

    @contextmanager
    def together(self) -> Iterator[None]:
        with ExitStack() as stack:
            for group in dict.fromkeys(self.by_device.values()):
                stack.enter_context(group.together())
            yield

    def fail(self, error: BaseException, call: str = "") -> None:
        super().fail(error, call)
        for group in self.by_device.values():
            group.fail(error, call)

    def abort(self) -> None:
        for group in self.by_device.values():
            group.abort()

    def close(self) -> None:
        for group in self.by_device.values():
            group.destroy()
