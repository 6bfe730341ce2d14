"""Key-value stores, through which the ranks of a job find each other."""

from cydist.stores.file import FileStore
from cydist.stores.hash import HashStore
from cydist.stores.members import MembersStore
from cydist.stores.prefix import PrefixStore
from cydist.stores.store import Store
from cydist.stores.tcp import TCPStore

__all__ = ["FileStore", "HashStore", "MembersStore", "PrefixStore", "Store", "TCPStore"]
