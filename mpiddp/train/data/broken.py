"""Image files that cannot be read: each is named once, and `--skip-broken` limits how many there may be.

A file on a disk that fails is none of them: the image may be intact, and another would take its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from mpiddp.errors import JobFailed, UserError
from mpiddp.text import escaped


class Broken(NamedTuple):
    """A file that cannot be read. Workers send it to their rank, because an exception would lose its type."""

    path: str
    reason: str
    is_failure: bool = False  # a machine failed: a disk, or a file server


class BrokenImages:
    """The broken images that this rank has found, in all its splits and by all its workers.

    Args:
        limit: how many the rank may skip.
        warn: receives a sentence about each one that is skipped.
    """

    def __init__(self, limit: int, warn: Callable[[str], None]) -> None:
        self.limit = limit
        self._warn = warn
        self._paths: set[str] = set()

    def note(self, found: Iterable[Broken]) -> None:
        """Count the images that are new. Several workers may find the same one.

        Raises:
            UserError: there are more than `limit`.
            JobFailed: a machine failed.
        """
        for path, reason, is_failure in found:
            if is_failure:
                raise JobFailed(escaped(f"{path} cannot be read ({reason})."))
            if path in self._paths:
                continue
            self._paths.add(path)
            sentence = escaped(f"{path}: Pillow cannot read this image ({reason}).")
            if len(self._paths) > self.limit:
                spent = f" --skip-broken {self.limit} allows no more." if self.limit else ""
                raise UserError(f"{sentence} Replace or remove it.{spent}")
            self._warn(
                f"warning: {sentence} The next image takes its place "
                f"({len(self._paths)} of at most {self.limit}, --skip-broken)."
            )
