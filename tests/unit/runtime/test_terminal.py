"""The launcher's terminal, as its ranks know it.

Tests mpiddp/protocol/terminal.py.
python -m pytest tests/unit/runtime/test_terminal.py
"""

from __future__ import annotations

import os

import pytest

from mpiddp.protocol.terminal import Manners, Terminal, give_size


@pytest.mark.parametrize(
    "terminal", [Terminal("012", 120, 33, has_prefix=True), Terminal("2"), Terminal()]
)
def test_it_travels_as_a_text(terminal: Terminal) -> None:
    assert Terminal.parse(str(terminal)) == terminal
    assert bool(str(terminal)) == bool(terminal.files)


def test_a_rank_has_the_columns_behind_its_prefix() -> None:
    terminal = Terminal("1", 80, 24).behind("[rank 0 node1] ")
    assert (terminal.columns, terminal.rows) == (65, 24)
    assert Terminal("1", 5, 24).behind("[rank 0 node1] ").columns == 1


def test_a_stream_that_is_no_terminal_is_a_pipe() -> None:
    terminal = Terminal("1", 70, 20)
    assert terminal.open(2) is None
    pair = terminal.open(1)
    assert pair is not None
    outer, inner = pair
    os.write(inner, b"a\n\x04")
    assert os.read(outer, 10) == b"a\n\x04"  # unchanged
    assert os.get_terminal_size(inner) == (70, 20)
    terminal._replace(columns=90).resize(outer)
    assert os.get_terminal_size(inner) == (90, 20)
    os.close(inner)
    os.close(outer)


def test_a_terminal_without_a_size_gets_one() -> None:
    outer, inner = os.openpty()
    give_size(inner)
    assert os.get_terminal_size(inner) == (80, 24)
    silent = Manners(echo=False, lines=False)
    silent.set(inner)
    assert Manners.of(outer) == silent
    os.close(inner)
    os.close(outer)
