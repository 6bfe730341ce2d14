"""Prose: sentences of all pages are short, docstrings begin with what a function does."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
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
THING_LAST = r"(What(ever)?|Who(ever|m|se)?|Where(ver)?|Of)\b"
VAGUE = r"(?i)\b(nobody|somebody|anybody|anew|so many|of ours|for people)\b"
NO_VERB = rf"{QUESTION}|(The|An?|This|Those|All|Every|Each|One|Some|True|None|No)\b|[A-Z]\w*[^s]s\b"


def name(page: Path) -> str:
    return page.name


def sentences(page: Path) -> list[str]:
    """The sentences of a page, outside code, tables and headings."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"^( *\||#|    ).*$", "", text, flags=re.M))
    paragraphs = re.split(r"\n\s*\n|\n(?=[-*\d])", text.replace("**", ""))
    joined = [re.sub(r"^([-*]|\d+\.) ", "", " ".join(each.split())) for each in paragraphs]
    return [each for part in joined for each in re.split(r"(?<=[.!?:;])\s+", part)]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_sentences_are_short(page: Path) -> None:
    """No sentence has over 25 words."""
    assert [each for each in sentences(page) if len(each.split()) > MOST_WORDS] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_sentences_begin_with_the_thing(page: Path) -> None:
    """No sentence but a question begins with a word that puts the thing last."""
    found = [each for each in sentences(page) if re.match(THING_LAST, each)]
    assert [each for each in found if not each.endswith("?")] == []


@pytest.mark.parametrize("page", USER_PAGES, ids=name)
def test_semicolons_stand_in_lists_only(page: Path) -> None:
    """And in tables: in a paragraph each claim is a sentence."""
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.S)
    text = re.sub(r"^( *\||#|  |[-*] |\d+\. ).*$", "", text, flags=re.M)
    assert re.findall(r".*;.*", text) == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_powers_are_no_bold_text(page: Path) -> None:
    """2**64 outside code is 264 on the page, and what follows is bold: write 2<sup>64</sup>."""
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.S)
    assert re.findall(r"\d\*\*\d+", text) == []


@pytest.mark.parametrize("page", USER_PAGES, ids=name)
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
