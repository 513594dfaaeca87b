"""Pages: the commands of README.md and docs/ print what the pages show.

A block ```console is run as it stands. `$ ` begins a command; what follows is compared with what it prints:
numbers and the name of the host may differ, `…` alone stands for any lines, and within a line for any text.
"""

import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_pages import USER_PAGES, blocks, named
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ALL_OUTPUT, ROOT, clean_env


def consoles() -> list[object]:
    """The pages that have something to run."""
    found: list[object] = []
    for page in USER_PAGES:
        texts = [block.text for block in blocks(page) if block.kind == "console"]
        if texts:
            found.append(pytest.param(page, id=named(page)))
    return found


@pytest.mark.parametrize("page", consoles())
def test_what_a_page_shows_is_what_its_commands_print(page, tmp_path):
    """Every command in a console block of README.md and docs/ prints what the page shows."""
    for folder in ("examples", "hostfiles"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for block in blocks(page):
        if block.kind == "console":
            compare(block.text, tmp_path)


MARK = "next command"


def compare(text: str, folder: Path) -> None:
    """Run the commands of a block in one shell, and compare what each prints."""
    shown = re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]
    pairs = [first_command(each) for each in shown]
    script = "".join(
        f"echo {shlex.quote(MARK)}\n(exit $code)\n{command}\ncode=$?\n" for command, _ in pairs
    )
    env = {name: value for name, value in clean_env().items() if name not in ALL_OUTPUT}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    done = subprocess.run(
        ["bash", "-c", f"code=0\n{script}"],
        cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    printed = done.stdout.split(f"{MARK}\n")[1:]
    assert len(printed) == len(pairs), done.stdout
    for (command, expected), actual in zip(pairs, printed, strict=True):
        assert re.fullmatch(pattern(expected), alike(actual)), f"$ {command}\n{actual}"


def first_command(text: str) -> tuple[str, str]:
    """A command, whose lines but the last end with a backslash, and what the page says that it prints."""
    found = re.match(r"((?:[^\n]*\\\n)*[^\n]*)\n?(.*)", text, re.DOTALL)
    return found[1], found[2]


def alike(text: str) -> str:
    """The text without what differs from machine to machine: numbers, the name of the host, spaces."""
    host = socket.gethostname().partition(".")[0]
    text = re.sub(rf"\b({re.escape(host)}|vm)\b", "HOST", text)
    text = re.sub(r"\d[\d,.]*\d|\d", "0", text)
    return "".join(f"{' '.join(line.split())}\n" for line in text.splitlines())


def pattern(expected: str) -> str:
    parts = [
        "(?:.*\n)*" if line == "…" else f"{re.escape(line).replace('…', '.*')}\n"
        for line in alike(expected).splitlines()
    ]
    return "".join(parts)


def test_another_line_would_be_found():
    """The comparison of a page with its commands allows for other numbers, but not for another line."""
    assert re.fullmatch(pattern("a 1\n…\nb … 2.5\n"), alike("a 7\nx\ny\nb is 3\n"))
    assert not re.fullmatch(pattern("a 1\n…\nb … 2.5\n"), alike("a 7\nx\ny\nc is 3\n"))
