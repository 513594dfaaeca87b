"""A picture of a real terminal: types commands into a pane of tmux, and writes what it shows as SVG.

    python -m docs.terminal PICTURE.svg [--shell PROGRAM] [--setup 'COMMAND; '] 'a command' …

It needs tmux. Text stays text, so a search finds it. A test of tests/promises/test_page_commands.py runs the
commands of README's picture again. To record it, as root:

    mkdir -p /tmp/demo
    sed 's/STEPS = 2000/STEPS = 600/' examples/ddp_with_checkpoints.py > /tmp/demo/train.py
    python -m docs.terminal docs/pictures/launch.svg --interrupt-at 'step 300' \\
        --shell "$PWD/.venv/bin/python -m tests.support.cluster --cwd /tmp/demo 2" \\
        --setup "export TERM=xterm PATH=$PWD/.venv/bin:\\$PATH; unset MPIDDP_LOG_RANKS MPIDDP_PREFIX; " \\
        'mpiddp launch -H node0:2,gpu7:2 train.py' \\
        'mpiddp launch -H node0:2,node1:2 train.py' \\
        'mpiddp launch -H node0:2,node1:1 train.py'
"""

from __future__ import annotations

import argparse
import html
import shlex
import subprocess
import sys
import time
from pathlib import Path

PROMPT = "$ "
_ROWS = 200  # more than a picture has; the empty ones are cut off
_LIMIT_S = 120.0
_CELL, _LINE, _MARGIN = 8.4, 19, 16  # pixels, of a font of 14
_BACKGROUND, _TEXT, _TYPED, _OURS = "#0d1117", "#d1d7e0", "#ffffff", "#79c0ff"


def record(
    shell: str, setup: str, commands: list[str], interrupt_at: str, columns: int
) -> list[str]:
    """The lines of the terminal after the commands, each typed when the one before has ended.

    `setup` is typed first, and is no longer shown. Where a line contains `interrupt_at`, Ctrl-C is typed.

    Raises:
        RuntimeError: a command is not done after 120 s.
    """
    server = ("tmux", "-L", "mpiddp-picture", "-f", "/dev/null")
    size = ("-x", str(columns), "-y", str(_ROWS))
    subprocess.run([*server, "new-session", "-d", *size, shell], check=True)
    try:
        first = f"{setup}PROMPT_COMMAND= PS1={shlex.quote(PROMPT)}; clear"
        for count, command in enumerate([first, *commands], 1):
            subprocess.run([*server, "send-keys", "-l", command], check=True)
            subprocess.run([*server, "send-keys", "Enter"], check=True)
            _wait_for_prompt(server, count, interrupt_at)
        lines = _shown(server)
    finally:
        subprocess.run([*server, "kill-server"], check=True)
    return lines[:-1]  # without the last prompt


def _wait_for_prompt(server: tuple[str, ...], count: int, interrupt_at: str) -> None:
    """Wait until so many prompts have been printed, and nothing follows the last one."""
    typed = False
    deadline = time.monotonic() + _LIMIT_S
    while True:
        lines = _shown(server)
        prompts = [line for line in lines if line.startswith(PROMPT.rstrip())]
        if len(prompts) == count and lines[-1] == PROMPT.rstrip():
            return
        since = lines.index(prompts[-1]) if prompts else 0
        if interrupt_at and not typed and any(interrupt_at in line for line in lines[since:]):
            subprocess.run([*server, "send-keys", "C-c"], check=True)
            typed = True
        if time.monotonic() > deadline:
            raise RuntimeError("the command is not done after 120 s:\n" + "\n".join(lines))
        time.sleep(0.1)


def _shown(server: tuple[str, ...]) -> list[str]:
    done = subprocess.run(
        [*server, "capture-pane", "-p"],
        check=True,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    return [line.rstrip() for line in done.stdout.rstrip().splitlines()]


def drawn(lines: list[str]) -> str:
    """The lines as SVG. What was typed is white, and the launcher's own lines are blue."""
    width = _MARGIN * 2 + _CELL * max(len(line) for line in lines)
    height = _MARGIN * 2 + _LINE * len(lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" '
        f'height="{height}" font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14">',
        f'<rect width="100%" height="100%" rx="8" fill="{_BACKGROUND}"/>',
    ]
    for number, line in enumerate(lines):
        typed, ours = line.startswith(PROMPT), line.removeprefix("^C").startswith("mpiddp: ")
        colour = _TYPED if typed else _OURS if ours else _TEXT
        at = f'x="{_MARGIN}" y="{_MARGIN + _LINE * number + 14}"'
        fits = f'textLength="{_CELL * len(line):.1f}"' if line else ""
        parts.append(
            f'<text {at} {fits} fill="{colour}" xml:space="preserve">{html.escape(line)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("picture", type=Path)
    parser.add_argument("--shell", default="bash --norc", help="what runs in the terminal")
    parser.add_argument("--setup", default="", help="commands, each followed by ;")
    parser.add_argument("--interrupt-at", default="", metavar="TEXT", help="type Ctrl-C there")
    parser.add_argument("--columns", type=int, default=92)
    parser.add_argument("commands", nargs="+")
    options = parser.parse_args()
    lines = record(
        options.shell, options.setup, options.commands, options.interrupt_at, options.columns
    )
    options.picture.write_text(drawn(lines), encoding="utf-8")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
