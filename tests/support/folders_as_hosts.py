"""Hosts that are folders of this machine: the real program of each host at the end of a pipe, without ssh.

tests/unit/hosts/test_push_between_folders.py and test_pull_between_folders.py use it.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from mpiddp.hosts import main as hosts_main
from mpiddp.hosts.cluster import fan_out
from mpiddp.hosts.hostfile import Host

HERE = "here/project"  # the same path on every host, whose working folders differ


def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns `hosts`: the folder of a host is `hosts / name`. This process is in that of "here"."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    (tmp_path / "here" / HERE).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(fan_out, "shell_command", lambda host, line: shell(tmp_path, host, line))
    return tmp_path


def shell(hosts: Path, host: Host, line: str) -> list[str]:
    """`line` on a host, each of which is a folder."""
    folder = hosts / host.name
    (folder / "here").mkdir(parents=True, exist_ok=True)
    return ["sh", "-c", f"cd {shlex.quote(str(folder))} && {line}"]


def modes_count(hosts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read and write everywhere; on the hosts it may no longer."""
    command = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    monkeypatch.setattr(
        fan_out, "shell_command", lambda host, line: [*command, *shell(hosts, host, line)]
    )


def write(folder: Path, **files: str) -> None:
    """`lib__a=...` is the file lib/a."""
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def files_of(folder: Path) -> dict[str, str]:
    paths = [path for path in folder.rglob("*") if path.is_file() and ".mpiddp" not in str(path)]
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(paths)}


def verb(*arguments: str) -> int:
    """`mpiddp hosts …` in the folder of this host. An absolute path leads every "host" to the same folder."""
    Path("hosts").write_text("localhost\nnode1\n")
    name, *rest = arguments
    return hosts_main.main([name, "hosts", *rest])
