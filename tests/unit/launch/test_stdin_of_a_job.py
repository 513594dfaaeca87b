"""What arrives at the launcher's stdin reaches rank 0, up to its end.

Tests mpiddp/launch/streams/input.py.
python -m pytest tests/unit/launch/test_stdin_of_a_job.py
"""

from __future__ import annotations

import os
import socket

import pytest

from mpiddp.launch.streams import input as stdin
from mpiddp.protocol.messages import GO
from tests.support.patience import PATIENCE_S


def test_stdin_is_copied_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr(stdin, "_STDIN", reader)
    ours, theirs = socket.socketpair()
    ours.settimeout(PATIENCE_S)
    copied = stdin.Input()
    copied.add(theirs)
    ours.sendall(GO)
    for text in (b"a\n", b"b"):
        os.write(writer, text)
        assert ours.recv(100) == text
    os.close(writer)
    assert ours.recv(100) == b""
    copied.close()
    ours.close()
    os.close(reader)
