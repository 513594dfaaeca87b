"""argparse as every verb uses it: complaints in one sentence, and the values that several of them read."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import NoReturn

from mpiddp.errors import UserError
from mpiddp.text import did_you_mean


class OneSentenceParser(argparse.ArgumentParser):
    """argparse whose complaints are a UserError, without a page of usage before it."""

    def error(self, message: str) -> NoReturn:
        hint = self._nearest_option(message)
        raise UserError(f"{self.prog}: {message}.{hint} See: {self.prog} --help")

    def _nearest_option(self, message: str) -> str:
        """A question that names the option which is nearest to an unknown one."""
        found = re.fullmatch(r"unrecognized arguments: (--[^\s=]+).*", message, re.DOTALL)
        if found is None:
            return ""
        actions = self._option_string_actions.items()
        known = [name for name, action in actions if action.help != argparse.SUPPRESS]
        return did_you_mean(found[1], known)


class DefaultsShown(argparse.ArgumentDefaultsHelpFormatter):
    """Each option's default after its help, where it has one worth reading that the help has not told."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_told = "default" in (action.help or "")
        is_plain = action.default is None or isinstance(action.default, (bool, list))
        return action.help if is_told or is_plain else super()._get_help_string(action)


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """A parser for whole numbers in [low, high)."""

    def whole_number(text: str) -> int:
        is_whole = text.isascii() and text.isdigit()
        if not is_whole or int(text) < low or (high is not None and int(text) >= high):
            bound = f"{low} or more" + ("" if high is None else f" and less than {high}")
            raise argparse.ArgumentTypeError(f"expected a whole number, {bound}, not {text!r}")
        return int(text)

    return whole_number
