"""The page of the command line, from the parsers of the verbs.

python -m docs.command_line     # writes command-line.md
"""

from __future__ import annotations

import argparse
from pathlib import Path
from unittest import mock

from mpiddp import cli
from mpiddp.bench import main as bench
from mpiddp.checkpoints import main as checkpoints
from mpiddp.cli import VERBS
from mpiddp.hosts import main as hosts

PAGE = Path(__file__).parent / "command-line.md"

_HEAD = """\
# Command line

<!-- Written by `python -m docs.command_line` from the parsers of the verbs. Change the help there. -->

This page has every option of mpiddp's own; [those of other launchers](migration.md) that it takes are not
here. `mpiddp COMMAND --help` prints the same with examples; `launch` and `train` print the most used options
with `--help`, and every one with `--help-all`.

Options of `mpiddp launch` come before the script, because what follows the script belongs to it. An option's
name may be written with underscores (`--max_restarts`), and a time as `30s`, `10m` or `1h`.
"""

# Their --help leaves out the options that are rarely used.
_WITH_HELP_ALL = ("launch", "train")
# The verbs that have verbs of their own.
PARTS = {"hosts": hosts.VERBS, "checkpoints": checkpoints.VERBS, "bench": bench.BENCHMARKS}


def text() -> str:
    """The page."""
    parts = [_HEAD.strip()]
    for verb, (_, line) in VERBS.items():
        parts.append(f"\n## mpiddp {verb}\n\n{line[0].upper()}{line[1:]}.")
        for part in PARTS.get(verb, ()):
            parts.append(f"\n### mpiddp {verb} {part}")
            parts.append(_table(parser_of(verb, part)))
        if verb == "run":
            parts.append(
                "\nWhere no launcher has started it as a rank, it has the options of `mpiddp launch`."
            )
        elif verb not in PARTS:
            parts.append(_table(parser_of(verb)))
    return "\n".join(parts) + "\n"


class _Made(BaseException):
    """Leaves a verb when its parser is made."""

    def __init__(self, parser: argparse.ArgumentParser):
        self.parser = parser


def parser_of(*words: str) -> argparse.ArgumentParser:
    """The parser of a verb, before it parses anything."""

    def made(parser: argparse.ArgumentParser, *_: object) -> None:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parser = action.choices[words[-1]]
        raise _Made(parser)

    names = ("parse_known_args", "print_help")
    with mock.patch.multiple(argparse.ArgumentParser, **dict.fromkeys(names, made)):
        try:
            cli.main([*words, "--help-all" if words[0] in _WITH_HELP_ALL else "--help"])
        except _Made as caught:
            return caught.parser
    raise AssertionError(f"mpiddp {' '.join(words)} has no parser")


def _table(parser: argparse.ArgumentParser) -> str:
    rows = [
        f"| `{_name(action)}` | {_help(action)} |"
        for group in parser._action_groups
        for action in group._group_actions
        if action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction)
    ]
    table = "\n".join(["", "| option | meaning |", "|---|---|", *rows]) if rows else ""
    return f"{table}\n\n{parser.epilog}" if parser.epilog else table


def _name(action: argparse.Action) -> str:
    value = ""
    if action.nargs != 0:
        value = str(action.metavar or action.dest.upper())  # as --help prints it
        if action.choices is not None:
            value = "{" + ",".join(map(str, action.choices)) + "}"
    return f"{', '.join(action.option_strings)} {value}".strip().replace("|", "\\|")


def _help(action: argparse.Action) -> str:
    shown = (action.help or "").replace("|", "\\|").replace("<", "&lt;")
    return shown % {"default": action.default} if "%" in shown else shown


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
