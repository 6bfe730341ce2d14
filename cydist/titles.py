"""Names of groups in messages."""

DEFAULT_GROUP = "0"  # the name of the group of all ranks
MOST = 4096  # descriptions that are remembered

_descriptions: dict[str, str] = {}  # by the names of groups


def describe_group(name: str, description: str | None) -> None:
    """Remember the user's description of a group of this name, which is to be made. What makes it
    finds it here. None: it has none."""
    _descriptions.pop(name, None)
    if description:
        _descriptions[name] = description
        if len(_descriptions) > MOST:
            _descriptions.pop(next(iter(_descriptions)), None)


def description_of(name: str) -> str:
    """Return the description of a group of this name, or the name."""
    return _descriptions.get(name, name)


def group_title(name: str, description: str = "") -> str:
    """Return the name of a group in messages.

        >>> group_title("0"), group_title("2"), group_title("2", "tensor parallel")
        ('the default group', "group '2'", "group 'tensor parallel'")

    Args:
        description: The user's, or the name itself. By default the one that was remembered.
    """
    described = description or description_of(name)
    return "the default group" if described == DEFAULT_GROUP else f"group {described!r}"
