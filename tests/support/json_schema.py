"""The keywords of JSON Schema that docs/recorder.schema.json uses."""

from __future__ import annotations

from typing import Any

KINDS = {
    "object": dict, "array": list, "string": str, "integer": int, "null": type(None),
    "boolean": bool,
}  # fmt: skip
KNOWN = {
    "$schema", "title", "description", "type", "required", "additionalProperties", "properties",
    "items", "const", "enum",
}  # fmt: skip


def violations(value: Any, schema: dict[str, Any], place: str = "") -> list[str]:
    """Where a value differs from what the schema says; [] if it is valid."""
    assert set(schema) <= KNOWN, set(schema) - KNOWN
    if "const" in schema and value != schema["const"]:
        return [f"{place} is {value!r}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{place} is {value!r}"]
    kinds = schema.get("type", list(KINDS))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    # True is an int in Python, and no integer in JSON.
    if not any(
        isinstance(value, KINDS[kind]) and isinstance(value, bool) == (kind == "boolean")
        for kind in kinds
    ):
        return [f"{place} is {value!r}"]
    found = []
    if isinstance(value, dict):
        known = schema.get("properties", {})
        found += [
            f"{place}.{name} is missing" for name in schema.get("required", ()) if name not in value
        ]
        if schema.get("additionalProperties", True) is False:
            found += [f"{place}.{name} is unknown" for name in value if name not in known]
        for name in set(known) & set(value):
            found += violations(value[name], known[name], f"{place}.{name}")
    if isinstance(value, list) and "items" in schema:
        for index, each in enumerate(value):
            found += violations(each, schema["items"], f"{place}[{index}]")
    return found
