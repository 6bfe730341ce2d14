"""cydist's own backends, registered in the same way as those of third parties.

A module is imported when the first group of its backend is made.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cydist.groups.registry import register_backend

if TYPE_CHECKING:
    from cydist.groups.process_group import ProcessGroup
    from cydist.groups.registry import BackendOptions


def _function(path: str) -> Callable[..., Any]:
    """Return the function "module:name" below cydist.backends; its module is imported here."""
    module, _, name = path.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    return function


class LazyBackend:
    """Makes groups of a backend with the function "module:name" below cydist.backends.

    Args:
        requires: Packages that the backend imports when it is used.
        of_all: Its groups share one of all ranks, which the first new_group makes if need be.
        encrypts: The backend encrypts what it sends to other hosts where CYDIST_ENCRYPT=1 is set.
    """

    extended_api = True

    def __init__(
        self,
        path: str,
        requires: tuple[str, ...] = (),
        of_all: bool = False,
        encrypts: bool = False,
    ) -> None:
        self._path = path
        self.requires = requires
        self.of_all = of_all
        self.encrypts = encrypts

    def __call__(self, options: BackendOptions, pg_options: object = None) -> ProcessGroup:
        made: ProcessGroup = _function(self._path)(options, pg_options)
        return made


class LazyFamily:
    """A backend for each name after the colon, by the function "module:name", which is given it."""

    def __init__(self, path: str) -> None:
        self._path = path

    def member(self, name: str) -> Callable[..., ProcessGroup]:
        """Return what makes groups of one backend of the family."""
        found: Callable[..., ProcessGroup] = _function(self._path)(name)
        return found


_tcp = LazyBackend("host.create:create", encrypts=True)
register_backend("tcp", _tcp, extended_api=True)
register_backend("gloo", _tcp, extended_api=True)
register_backend("inproc", LazyBackend("host.create:create_inproc"), extended_api=True)
register_backend(
    "mpi", LazyBackend("mpi.create:create", ("mpi4py",), of_all=True), extended_api=True
)
register_backend(
    "nccl", LazyBackend("nccl.create:create", ("cupy",)), extended_api=True, devices="cuda"
)
register_backend("torch", LazyFamily("torch:member"))
