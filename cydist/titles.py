"""Names of groups in messages."""

DEFAULT_GROUP = "0"  # the name of the group of all ranks


def group_title(name: str, description: str = "") -> str:
    """Return the name of a group in messages.

        >>> group_title("0"), group_title("2"), group_title("2", "tensor parallel")
        ('the default group', "group '2'", "group 'tensor parallel'")

    Args:
        description: The user's, or the name itself.
    """
    described = description or name
    return "the default group" if described == DEFAULT_GROUP else f"group {described!r}"
