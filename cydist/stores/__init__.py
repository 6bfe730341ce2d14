"""Key-value stores, through which the ranks of a job find each other."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from cydist.stores.membership_store import MembershipStore
from cydist.stores.prefix import PrefixStore
from cydist.stores.store import Store
from cydist.stores.tcp import TCPStore

if TYPE_CHECKING:
    from cydist.stores.file import FileStore
    from cydist.stores.hash import HashStore

__all__ = ["FileStore", "HashStore", "MembershipStore", "PrefixStore", "Store", "TCPStore"]

# Imported at first use, since few jobs need them.
_LATER = {"FileStore": "cydist.stores.file", "HashStore": "cydist.stores.hash"}

if not TYPE_CHECKING:  # otherwise every name would seem to exist

    def __getattr__(name):
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
        return found
