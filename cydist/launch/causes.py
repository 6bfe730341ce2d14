"""Tell a first failure from the failures that it causes on other ranks."""

from __future__ import annotations

# Errors that report another rank's death: never the first cause if there is another error.
_CONSEQUENCES = (
    "PeerFailedError",
    "GroupFailedError",
    "RendezvousError",
    "lost the store",
    "Connection closed by peer",
)


def is_secondary_failure(text: str) -> bool:
    """Return whether this traceback is about the death of another rank."""
    return any(name in text for name in _CONSEQUENCES)
