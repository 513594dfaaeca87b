"""The line of the script in which a rank is, by the text of the Python stacks that it has sent."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_LONGEST_CODE = 60  # characters

# The folder of this package is the same on every host. Ranks run some of its programs as scripts.
_PACKAGE = f"{Path(__file__).parents[2]}/"
_PROGRAMS = re.compile(rf"{re.escape(_PACKAGE)}(bench|doctor|train)/")
_OF_LIBRARIES = re.compile(r"^<frozen |/lib/python3|/torch/|/site-packages/|/dist-packages/")
_JOINS = re.compile(r"/(threading|concurrent/futures/\w+)\.py$")  # they wait for a thread
_FRAME = re.compile(r'^  File "([^"]+)", line (\d+), in (.*)(?:\n    (.*))?', re.MULTILINE)
# The frames of Python and of this package that start a script, and so stand above the script's own.
_STARTS = rf"<frozen |<string>|[^\"]*/runpy\.py|(?!{_PROGRAMS.pattern}){re.escape(_PACKAGE)}"
_ABOVE_SCRIPT = re.compile(rf'(?:(?<=:\n)|\A)(?:  File "(?:{_STARTS})[^\n]*\n(?:    [^\n]*\n)*)+')


class Frame(NamedTuple):
    """A line of a stack."""

    file: str
    line: str
    function: str
    code: str


def shown_stack(text: str) -> str:
    """The text without the frames that start the script."""
    return _ABOVE_SCRIPT.sub("", text).rstrip()


def stacks_of_script(text: str) -> str:
    """The stack of the main thread, and of each other thread that executes a line of the script."""
    main, *others = shown_stack(text).split("\nthread ")
    threads = (other for other in others if any(map(_is_of_script, _frames(other))))
    return "\nthread ".join([main, *threads]).rstrip()


def frames_of(text: str) -> Sequence[Frame]:
    """The frames of the script's main thread, or of the thread that it joins; the outermost first."""
    main, *scripts = map(_frames, stacks_of_script(text).split("\nthread "))
    return scripts[0] if scripts and main and _JOINS.search(main[-1].file) else main


def _frames(thread: str) -> list[Frame]:
    return [Frame(*frame) for frame in _FRAME.findall(thread)]


def place_of(text: str) -> str:
    """The innermost line of the script, such as "load (data.py:40): open(path)"; "" without a frame."""
    frames = frames_of(text)
    if not frames:
        return ""
    file, line, function, code = next(filter(_is_of_script, reversed(frames)), frames[-1])
    code = code.rstrip(":,.")
    if len(code) > _LONGEST_CODE:
        code = f"{code[:_LONGEST_CODE].rstrip()} …"
    return f"{function} ({file.rpartition('/')[2]}:{line})" + (f": {code}" if code else "")


def _is_of_script(frame: Frame) -> bool:
    """Whether a frame is in the script, and not in a library."""
    if frame.file.startswith(_PACKAGE):
        return _PROGRAMS.match(frame.file) is not None
    return _OF_LIBRARIES.search(frame.file) is None
