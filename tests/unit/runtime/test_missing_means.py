"""A host that lacks what a rank needs beside the job itself: files, or torch for the store of commands.

Tests mpiddp/runtime/launcher/output.py, mpiddp/runtime/rendezvous/store_process.py.
python -m pytest tests/unit/runtime/test_missing_means.py
"""

from __future__ import annotations

import re
import socket
import sys

import pytest

from mpiddp.errors import JobFailed, UserError
from mpiddp.runtime.job.connect import Server
from mpiddp.runtime.job.session import Session
from mpiddp.runtime.launcher.output import redirect_output
from mpiddp.runtime.rendezvous.store_process import serve_commands
from mpiddp.world import World
from tests.support.errors import error
from tests.support.few_files import files_left

RANK = World(3, 4, 1, 2)


@pytest.mark.parametrize("left", [1, 3, 5])
def test_an_output_process_without_files(left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For two pipes and a socket pair. The streams stay as they are."""
    monkeypatch.setenv("MPIDDP_OUTPUT", "all")
    sentence = error("start its", f"rank 3 on {RANK.hostname} ", "Too many open files")
    with files_left(left), pytest.raises(JobFailed, match=f"^{sentence}$"):
        redirect_output(RANK, Server("127.0.0.1:1", "secret"))


def test_the_store_of_commands_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with socket.socket() as listener, pytest.raises(UserError) as refused:
        serve_commands(RANK, listener, Session())
    install = (f"Run: {sys.executable} -m pip install '", "[train]'")
    sentence = error("have. Run", "the store ", " torch,", f" {sys.executable} ", *install)
    assert re.fullmatch(sentence, str(refused.value))
