"""argparse as every verb uses it: one sentence per error, shared value parsers."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from mpiddp.errors import UserError
from mpiddp.text import did_you_mean, parse_duration, parse_whole, shown

OUT = "{out}"  # in an argument of a script that runs several times: a new folder for each run

# The arguments of Python for a process of ours, in any folder. The working folder is off its path, because
# Python itself would not start beside a user's types.py.
OURS: tuple[str, ...] = ("-P", "-m", "mpiddp")
if sys.version_info < (3, 11):
    OURS = ("-c", "import sys; del sys.path[0]; from mpiddp.cli import main; sys.exit(main())")


def examples(prog: str) -> str:
    """The examples of `mpiddp VERB`, or of a verb of it, with which its help begins; "" if there are none."""
    lines = Path(__file__).with_name("examples.txt").read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if f"{prog} " in f"{line} ".partition("&&")[0])


class Option:
    """An option of a verb, or an argument, whose name has no dash. It is a switch if it has no value.

    Without a name, it has that of its `dest`. `value` is the name of its value in the help, and `parse` makes the
    value of a text, or raises ArgumentTypeError. `also` are spellings of other launchers, which no help lists.
    `more` is argparse's.
    """

    def __init__(
        self,
        *names: str,
        value: str = "",
        parse: Callable[[str], Any] = str,
        repeats: bool = False,
        **more: Any,
    ) -> None:
        self.names, self.also, self.repeats, self._more = names, more.pop("also", ()), repeats, more
        self.value, self.parse = value or "|".join(more.get("choices", ())), parse

    def add_to(self, parser: argparse._ActionsContainer, **more: Any) -> argparse.Action:
        more = {**self._more, **more}
        names = self.names or (flag_of(more["dest"]),)
        flags = [*names, *self.also]
        flags += [f"--{flag[2:].replace('-', '_')}" for flag in flags if "-" in flag[2:]]
        if not self.value:
            more["action"] = "store_false" if more.get("default") else "store_true"
        elif "choices" not in more:
            more = {"metavar": self.value, "type": self.parse, **more}
        if self.repeats:
            more |= {"action": "append", "default": []}
        action = parser.add_argument(*flags, **more)
        action.option_strings = [*names] if action.option_strings else []
        return action

    def parsed(self, text: str, source: str) -> Any:
        """The value of a text of this source. Raises UserError."""
        try:
            if text not in (choices := self._more.get("choices", [text])):
                raise argparse.ArgumentTypeError(
                    f"expected {', '.join(choices)}, not {shown(text)!r}"
                )
            return self.parse(text)
        except argparse.ArgumentTypeError as error:
            raise UserError(f"{source}: {error}.") from None


def flag_of(dest: str) -> str:
    return f"--{dest.replace('_', '-')}"


def option(*names: str, default: Any = None, **more: Any) -> Any:
    """A field of a record that is this `Option`, with more metadata.

    `group` is the title of a group of the help, which the option begins. `is_common`: --help shows it, too,
    and not only --help-all. `by_hostfile`: a hostfile may choose it.
    """
    metadata = {name: more.pop(name, "") for name in ("group", "is_common", "by_hostfile")}
    argument = Option(*names, **more)
    if argument.repeats or not argument.value:
        default = () if argument.repeats else bool(default)
    return field(default=default, metadata={"option": argument, **metadata})


common = partial(option, is_common=True)


def options_of(record: type) -> dict[str, Field[Any]]:
    """The fields of a dataclass that are options, by name, in the order in which it has them."""
    rows = record.__dataclass_fields__  # type: ignore[attr-defined]
    return {name: rows[name] for name in record.__annotations__ if "option" in rows[name].metadata}


class _ShortHelp(argparse._HelpAction):
    """Print the help without the rare options, and exit."""

    def __call__(self, parser: Any, *rest: Any) -> None:
        left_out = (*parser.rare, "help", "help_all")
        actions = [action for action in parser._actions if action.dest not in left_out]
        parser._action_groups = []
        parser.add_argument_group("options (--help-all shows every one)")._group_actions = actions
        super().__call__(parser, *rest)


class OneSentenceParser(argparse.ArgumentParser):
    """argparse that raises its errors as UserError, without printing the usage."""

    elsewhere: Mapping[str, str] = MappingProxyType({})  # hints, by patterns of misplaced options

    def __init__(
        self, *, allow_abbrev: bool = False, record: type | None = None, **more: Any
    ) -> None:
        """`record`: of its options, --help shows the common ones alone, and --help-all shows every option."""
        if record:
            more["add_help"] = False
        super().__init__(allow_abbrev=allow_abbrev, **more)
        if record:
            self.rare = [
                name for name, row in options_of(record).items() if not row.metadata["is_common"]
            ]
            self.add_argument("-h", "--help", action=_ShortHelp, help="show the most used options")
            self.add_argument("--help-all", action="help", help="show every option")

    def format_help(self) -> str:
        usage, _, rest = super().format_help().partition("\n\n")
        return "\n\n".join(part for part in (usage, examples(self.prog), rest) if part)

    def error(self, message: str) -> NoReturn:
        hint, fix = "", f"{self.prog} --help"
        if unknown := re.fullmatch(r"unrecognized arguments: ([^\s=]+).*", message, re.DOTALL):
            actions = self._option_string_actions.items()
            option = long_form(unknown[1].replace("_", "-"))
            hints = [text for form, text in self.elsewhere.items() if re.fullmatch(form, option)]
            listed = [name for name, action in actions if action.help != argparse.SUPPRESS]
            names = [name for name in listed if "_" not in name] if option[:1] == "-" else []
            hint = did_you_mean(option, names)
            fix = (hints or [fix])[0]
        message, _, choices = message.partition(" (choose from ")
        fix = f"choose from {choices[:-1]}" if choices else fix
        raise UserError(f"{self.prog}: {message}.{hint}", fix=fix)

    def _parse_optional(self, arg_string: str) -> Any:
        """Read mpirun's `-hostfile` as `--hostfile`. argparse would take it for `-h`, and `-mca` for `-m`."""
        name = long_form(arg_string.partition("=")[0])
        options = self._option_string_actions
        has_meaning = name in options or any(re.fullmatch(form, name) for form in self.elsewhere)
        if arg_string not in options and has_meaning:
            arg_string = long_form(arg_string)
        return super()._parse_optional(arg_string)


def long_form(option: str) -> str:
    """The option with two dashes, if its name has more than one letter."""
    return re.sub("^-(?=[a-z]{2})", "--", option)


class Verb(NamedTuple):
    """A verb of a verb, such as `push` of `mpiddp hosts`. examples.txt has its examples."""

    purpose: str
    run: Callable[..., int]  # gets the parsed options, and returns the exit code
    options: Sequence[Option] = ()
    arguments: str = ""  # as its usage shows them, if argparse would not


def add_verbs(parser: argparse.ArgumentParser, verbs: Mapping[str, Verb]) -> Mapping[str, Any]:
    """Add these verbs. Returns their parsers. The value `verb` is the name of the one that is typed."""
    added = parser.add_subparsers(dest="verb", metavar="COMMAND", required=True)
    for name, verb in verbs.items():
        usage = f"{parser.prog} {name} [options] {verb.arguments}" if verb.arguments else None
        of_verb = added.add_parser(
            name, help=verb.purpose, description=f"{verb.purpose}.", usage=usage
        )
        for option in verb.options:
            option.add_to(of_verb)
    return added.choices


def whole(low: int) -> Callable[[str], int]:
    """A parser for whole numbers from `low` on, below a billion."""

    def whole_number(text: str) -> int:
        try:
            return parse_whole(text, low)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"expected {error}, not {shown(text)!r}") from None

    return whole_number


def duration(text: str) -> float:
    """A parser for a time in seconds: 90, 90s, 55m or 1.5h."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def shell_words(text: str) -> tuple[str, ...]:
    """The words of the text, as a shell splits it."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{shown(text)}: {str(error).lower()}") from None


def shell_command(text: str) -> tuple[str, ...]:
    if words := shell_words(text):
        return words
    raise argparse.ArgumentTypeError("expected a command")


def as_arguments(actions: Iterable[argparse.Action], values: argparse.Namespace) -> list[str]:
    """The arguments that give these options these values, for another command with the same options."""
    arguments = []
    for action in actions:
        value, flag = getattr(values, action.dest), action.option_strings[0]
        if action.nargs == 0:
            arguments += [flag] if value == action.const != action.default else []
        elif isinstance(value, list):
            arguments += [f"{flag}{'=' * flag.startswith('--')}{item}" for item in value]
        elif (
            value is not action.default
        ):  # a typed value that equals it takes precedence over the hostfile's
            arguments += [flag, str(value)]
    return arguments
