"""What a push believes of a host. tests/promises/test_hosts.py has the pushes."""

import os
import resource
import sys
import zlib
from base64 import b64encode

import pytest

from mpiddp.files import read_limited
from mpiddp.hosts import push, pushed


def test_a_list_that_a_host_has_written_does_not_fill_the_memory():
    """95 kB may unpack to gigabytes. Then the host counts as one to which nothing has been sent."""
    assert push.listed_paths(b64encode(zlib.compress(b"a\0b/c")).decode()) == {"a", "b/c"}
    assert push.listed_paths("no list") == set()
    packer = zlib.compressobj(9)
    zeros = bytes(1 << 20)
    bomb = b"".join(packer.compress(zeros) for _ in range(600)) + packer.flush()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert push.listed_paths(b64encode(bomb).decode()) == set()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600_000  # kB


def test_a_list_of_another_hand_is_none(tmp_path):
    """In a folder that others may write, nobody waits for a pipe, and another user's list removes no file."""
    kept = tmp_path / pushed.SENT
    kept.write_text("list")
    assert pushed.prepare([str(tmp_path)])["sent"] == ["list"]
    if os.geteuid() == 0:  # others may give no file away
        os.chown(kept, 60_001, -1)
        assert pushed.prepare([str(tmp_path)])["sent"] == [""]
        assert read_limited(kept, 4) == b"list"
    kept.unlink()
    os.mkfifo(kept)
    assert pushed.prepare([str(tmp_path)])["sent"] == [""]


@pytest.mark.parametrize(
    ("base", "is_brought"), [(".pyenv/versions/3.11", True), (".local", False)]
)
def test_a_python_in_the_home(tmp_path, monkeypatch, base, is_brought):
    """A push makes its folder the same on all hosts, but not ~/.local, which has other programs, too."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "project/.venv"))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / base))
    assert (str(tmp_path / base) in push._environment()) == is_brought
