"""Prose: sentences of user pages are short, docstrings begin with what a function does."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Pages of measurements and findings, which are not written for users.
LAB_NOTES = {"algorithms.md", "bugs.md", "lab_notes.md", "mpi.md"}
PAGES = [
    p
    for p in [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
    if p.name not in LAB_NOTES
]
USER_PAGES = [p for p in PAGES if p.parent.name != "dev"]
# Words of pages for users that the field does not have, or that point at nothing.
PRIVATE = (
    r"(?i)\b(nobody|somebody|anybody|anew|goes by|lives on|as ever"
    r"|farewell|goodbye|ours?|we|told)\b|\bcommit [0-9a-f]{7}"
)
MOST_WORDS = 25
QUESTION = (
    r"(What\w*|Who\w*|Where\w*|Why|How\w*|Which|Is|Are|Was|Has|Have|Does|Did|Can|May|Must|Should)\b"
)
VAGUE = r"(?i)\b(nobody|somebody|anybody|anew|so many|of ours|for people)\b"
NO_VERB = rf"{QUESTION}|(The|An?|This|Those|All|Every|Each|One|Some|True|None|No)\b|[A-Z]\w*[^s]s\b"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sentences_are_short(page: Path) -> None:
    """No sentence of a page for users, outside code, tables and headings, has over 25 words."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"^( *\||#|    ).*$", "", text, flags=re.M))
    paragraphs = [" ".join(each.split()) for each in re.split(r"\n\s*\n|\n(?=[-*\d])", text)]
    found = [each for part in paragraphs for each in re.split(r"(?<=[.!?:;])\s+", part)]
    assert [each for each in found if len(each.split()) > MOST_WORDS] == []


@pytest.mark.parametrize("page", USER_PAGES, ids=lambda page: page.name)
def test_pages_use_the_words_of_the_field(page: Path) -> None:
    """A page for users has no private word and no commit; cydist acts in it, not "we"."""
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.S)
    assert [match[0] for match in re.finditer(PRIVATE, text)] == []


def docstrings() -> Iterator[tuple[str, str, bool]]:
    """Yield place and text of every docstring, and whether it is a function's."""
    python = [*(ROOT / "cydist").rglob("*.py"), *(ROOT / "docs/examples").rglob("*.py")]
    for path in (each for each in python if not each.name.startswith("test_")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                place = f"{path.name}:{getattr(node, 'lineno', 1)}"
                yield place, ast.get_docstring(node) or "", isinstance(node, ast.FunctionDef)
    heads = r'^ *c?p?def (?:(?!\n *c?p?def )[^"#])*:\n\s+"""[^"]*'
    for path in ROOT.glob("src/**/*.pyx"):
        for head, text in (each.split('"""') for each in re.findall(heads, path.read_text(), re.M)):
            yield path.name, text, "class " not in head


def test_docstrings_say_what_a_function_does() -> None:
    """A function's docstring begins with an imperative, no other with a question; none is vague."""
    found = [
        (place, text, NO_VERB if function else QUESTION) for place, text, function in docstrings()
    ]
    assert [each for each in found if re.match(each[2], each[1]) or re.search(VAGUE, each[1])] == []
