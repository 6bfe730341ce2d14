"""Directives that make the reference from cydist itself, so that it cannot go stale.

`{command-line} cydist.bench.__main__ kernels` lists the options of a command line, from its
argparse parser. `{settings}` lists the environment variables, from cydist/config.py.
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Iterator
from typing import Any, NoReturn
from unittest import mock

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from cydist import config


class _Found(Exception):
    """Carries the parser that was about to print its help."""


def parser_of(module: str, arguments: list[str]) -> argparse.ArgumentParser:
    """Return the parser that a program's main uses for these arguments."""

    def stop(parser: argparse.ArgumentParser, file: object = None) -> NoReturn:
        raise _Found(parser)

    with mock.patch.object(argparse.ArgumentParser, "print_help", stop):
        try:
            importlib.import_module(module).main([*arguments, "--help"])
        except _Found as found:
            return found.args[0]
    raise ValueError(f"{module} {arguments} has no help")


def _cell(text: str) -> str:
    """Return a text that neither a table nor Markdown takes for its own signs."""
    text = re.sub(r"([|*_<>\[\]$])", r"\\\1", " ".join(text.split()))
    return re.sub(r"(?<![`\w])(--[a-z][\w-]*)", r"`\1`", text)


def _help(action: argparse.Action) -> str:
    parts = {**vars(action), "prog": ""}
    text = (action.help or "") % parts if action.help else ""
    if action.choices and not isinstance(action, argparse._SubParsersAction):
        text += f" ({', '.join(map(str, action.choices))})"
    shown = action.default not in (None, "", False, argparse.SUPPRESS, 0)
    if shown and action.nargs != 0 and not re.search(r"default|\(\S+\)$", text):
        text += f" (default: {action.default})"
    return _cell(text)


def rows(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield Markdown: a table for each group of options."""
    for group in parser._action_groups:
        actions = [
            each
            for each in group._group_actions
            if each.help is not argparse.SUPPRESS and not isinstance(each, argparse._HelpAction)
        ]
        if not actions:
            continue
        if group.title not in ("positional arguments", "options"):
            yield f"**{group.title.capitalize()}**\n\n"
        yield "| option | meaning |\n|---|---|\n"
        for action in actions:
            if isinstance(action, argparse._SubParsersAction):
                for each in action._choices_actions:
                    yield f"| `{each.dest}` | {_cell(each.help or '')} |\n"
                continue
            names = ", ".join(f"`{each}`" for each in action.option_strings if "_" not in each)
            if not action.option_strings:
                names = f"`{action.metavar or action.dest}`"
            elif action.nargs != 0:
                value = action.metavar or action.dest.upper()
                names += f" `{value}`" if isinstance(value, str) else f" `{' '.join(value)}`"
            yield f"| {names} | {_help(action)} |\n"
        yield "\n"


class CommandLine(SphinxDirective):
    """List the options of a program: its module, and arguments before the options."""

    required_arguments = 1
    optional_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        parser = parser_of(self.arguments[0], self.arguments[1:])
        text = f"{_cell(parser.description or '')}\n\n{''.join(rows(parser))}"
        found = self.parse_text_to_nodes(text)
        if parser.epilog and parser.formatter_class is argparse.HelpFormatter:
            found += self.parse_text_to_nodes(_cell(parser.epilog))
        elif parser.epilog:  # its lines are as they shall be
            found.append(nodes.literal_block(parser.epilog, parser.epilog, language="text"))
        return found


class Settings(SphinxDirective):
    """List the environment variables that cydist reads."""

    def run(self) -> list[nodes.Node]:
        found = [each for each in vars(config).values() if isinstance(each, config.Variable)]
        text = "| variable | default | meaning |\n|---|---|---|\n"
        for each in found:
            names = ", ".join(f"`{name}`" for name in each.names)
            default = f"`{each.default}`" if each.default else ""
            text += f"| {names} | {default} | {_cell(each.meaning)} |\n"
        return self.parse_text_to_nodes(text)


def setup(app: Sphinx) -> dict[str, Any]:
    """Make the directives known to Sphinx."""
    app.add_directive("command-line", CommandLine)
    app.add_directive("settings", Settings)
    return {"parallel_read_safe": True}
