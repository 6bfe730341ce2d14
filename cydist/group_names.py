"""Names of groups, and what messages call the groups."""

from __future__ import annotations

DEFAULT_GROUP = "0"  # the name of the group of all ranks


class GroupName(str):
    """The name of a group, which carries the user's description of it.

    It goes to the backend that makes the group, so that errors about the making have the
    description, too. Equality and hash are the name's.

        >>> name = GroupName("2", "tensor parallel")
        >>> name == "2", name.description, GroupName("2").description
        (True, 'tensor parallel', '2')

    Args:
        name: The name. If it has a description, that is the default.
        description: The user's. None or "": the name.
    """

    description: str

    def __new__(cls, name: str, description: str | None = None) -> GroupName:
        made = super().__new__(cls, name)
        given = name.description if isinstance(name, GroupName) else str(name)
        made.description = description or given
        return made

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # errors that hold a name are pickled, and read with few types


def group_title(name: str) -> str:
    """Return the name of a group in messages.

    >>> group_title("0"), group_title("2"), group_title(GroupName("2", "tensor parallel"))
    ('the default group', "group '2'", "group 'tensor parallel'")
    """
    described = GroupName(name).description
    return "the default group" if described == DEFAULT_GROUP else f"group {described!r}"
