"""Dumps as torch's flight recorder analyser reads them: a pickle of plain lists and dictionaries.

cydist writes this format and never reads it, since reading a pickle may run code.
"""

from __future__ import annotations

import pickle
from typing import Any

# Of torch's format: the first in which the analyser matches messages and collectives as here.
VERSION = "2.10"
# torch's names of dtypes differ in capitals only; its analyser compares them as words.
STATES = {"over": "completed", "running": "started", "posted": "scheduled",
          "enqueued": "scheduled", "failed": "started"}  # fmt: skip
# The analyser stops at a name that it does not know.
NAMES = {
    "all_gather": "all_gather", "all_gather_into_tensor": "_all_gather_base",
    "all_gather_single": "all_gather_single", "all_reduce": "all_reduce",
    "all_to_all": "all_to_all", "all_to_all_single": "all_to_all_single", "barrier": "barrier",
    "broadcast": "broadcast", "gather": "gather", "monitored_barrier": "barrier",
    "reduce": "reduce", "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter_single",
    "reduce_scatter_tensor": "_reduce_scatter_base", "scatter": "scatter",
}  # fmt: skip


def encode(found: dict[str, Any]) -> bytes:
    """Return a dump as bytes that torch's analyser reads, in a file whose name ends in the rank.

    Calls without a counterpart in torch, such as scan, are left out.
    """
    groups = {group["group"]: group for group in found["groups"]}
    shift = found["written_unix_ns"] - found["written_ns"]
    entries: list[dict[str, Any]] = []
    messages: dict[int, int] = {}
    for call in found["calls"]:
        group = groups.get(call["group"])
        if group is not None and (name := _name(call, group, found["rank"])) is not None:
            if call["seq"] is None:
                messages[call["group"]] = messages.get(call["group"], 0) + 1
            entries.append(_entry(call, group, name, messages.get(call["group"], 0), shift))
    return pickle.dumps(
        {
            "version": VERSION,
            "pg_config": {
                _key(group): {
                    "name": _key(group),
                    "desc": group["name"],
                    "ranks": str(group["ranks"]),
                }
                for group in groups.values()
            },
            "pg_status": {},
            "entries": entries,
        }
    )


def _key(group: dict[str, Any]) -> str:
    """Return a group's name, which is equal on all its ranks."""
    return str(group["name"])


def _name(call: dict[str, Any], group: dict[str, Any], rank: int) -> str | None:
    """Return the call's name as the analyser expects it; None: it has none."""
    if call["tag"] is None:
        name = NAMES.get(call["call"])
        return None if name is None else f"gloo:{name}"
    if call["peer"] is None:
        return None
    # The analyser counts within the sorted ranks of the group.
    order = sorted(group["ranks"])
    own, peer = order.index(rank), order.index(call["peer"])
    return f"gloo:send {own}->{peer}" if call["call"] == "send" else f"gloo:recv {own}<-{peer}"


def _entry(
    call: dict[str, Any], group: dict[str, Any], name: str, messages: int, shift: int
) -> dict[str, Any]:
    """Return one call as the analyser reads it."""
    # Elements are not recorded, but bytes and dtype are: ranks that differ in size differ here.
    sizes = [[call["bytes"]]] if call["bytes"] else [[]]
    dtypes = [call["dtype"] or ""]
    ended = call["ended_ns"]
    return {
        "record_id": call["number"],
        "pg_id": call["group"],
        "process_group": (_key(group), group["name"]),
        "collective_seq_id": call["seq"] or 0,
        "p2p_seq_id": messages,
        "op_id": call["number"],
        "profiling_name": name,
        "time_created_ns": call["entered_ns"] + shift,
        "input_sizes": sizes,
        "input_dtypes": dtypes,
        "output_sizes": sizes,
        "output_dtypes": dtypes,
        "state": STATES[call["state"]],
        "time_discovered_started_ns": call["began_ns"] + shift,
        "time_discovered_completed_ns": None if ended is None else ended + shift,
        "retired": call["state"] in ("over", "failed"),
        "timeout_ms": 0,
        "is_p2p": call["seq"] is None,
        "frames": [],
    }
