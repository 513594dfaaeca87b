"""Which clusters stand on this machine: a folder for each under /run, written while it stands.

It lets another process look into a cluster, take it down, or clear away what a killed one left.
MPIDDP_TEST_CLUSTERS names another folder below /run, whose clusters no other run sees.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.cluster import proc
from tests.cluster.host import Host

STATE = Path(os.environ.get("MPIDDP_TEST_CLUSTERS", "/run/mpiddp-cluster"))

Identity = tuple[int, int | None]  # a pid and its start time: one process for good


@dataclass(frozen=True)
class Cluster:
    """A standing cluster. `shared` is a folder that every user of every host, and this machine,
    sees under the same path. /tmp and the rest of the file system are shared as well, except /etc,
    /run, /sys, /dev/shm and the home folders."""

    name: str
    hosts: tuple[Host, ...]
    shared: Path

    def __getitem__(self, name: str) -> Host:
        for host in self.hosts:
            if host.name == name:
                return host
        raise KeyError(f"no host {name}; there are {', '.join(host.name for host in self.hosts)}")


def identity(pid: int) -> Identity:
    return pid, proc.start_time(pid)


def standing() -> list[str]:
    """The names of all clusters, also of those whose maker was killed."""
    return sorted(path.parent.name for path in STATE.glob("[!.]*/state.json"))


def reserve(name: str) -> Path:
    """Makes the folder of a new cluster, owned by this process until `record` says otherwise.

    Raises RuntimeError when there is one of that name.
    """
    new = STATE / f".{name}.{os.getpid()}"
    while True:
        with suppress(FileNotFoundError):  # the end of the last cluster has removed STATE meanwhile
            (new / "shared").mkdir(parents=True)
            break
    (new / "shared").chmod(0o1777)
    record(new, owner=identity(os.getpid()))
    try:
        return new.rename(STATE / name)  # whole at once: others see no folder without an owner
    except OSError:
        shutil.rmtree(new)
        raise RuntimeError(f"a cluster {name} stands already; take it down first") from None


def record(
    folder: Path,
    *,
    owner: Identity | None,
    processes: tuple[Identity, ...] = (),
    hosts: tuple[Host, ...] = (),
) -> None:
    """Writes down what belongs to a cluster. With no owner it stands by itself."""
    state = {"owner": owner, "processes": processes, "hosts": [asdict(host) for host in hosts]}
    (folder / "new").write_text(json.dumps(state))
    (folder / "new").rename(folder / "state.json")


def attach(name: str) -> Cluster:
    """A cluster that another process has made. Raises FileNotFoundError when there is none."""
    state = _read(name)
    return Cluster(name, tuple(Host(**host) for host in state["hosts"]), STATE / name / "shared")


def alive(name: str) -> bool:
    """Whether a cluster is in use: its owner lives, or it has none and its processes do."""
    try:
        state = _read(name)
    except FileNotFoundError:  # another process has just taken it down
        return False
    needed = [state["owner"]] if state["owner"] else state["processes"]
    return any(proc.is_running(pid, started) for pid, started in needed)


def take_down(name: str) -> None:
    """Ends all processes of a cluster and forgets it. Does nothing when there is none."""
    try:
        processes = _read(name)["processes"]
    except FileNotFoundError:
        return
    for pid, started in processes:
        if proc.start_time(pid) == started:
            if child := proc.first_child(pid):  # a host's pid 1; the switch has none
                proc.kill_and_wait(child, proc.start_time(child))
            proc.kill_and_wait(pid, started)
            proc.reap(pid)
    try:
        gone = (STATE / name).rename(STATE / f".{name}.gone.{os.getpid()}")
    except FileNotFoundError:  # another process has been faster
        return
    shutil.rmtree(gone)
    with suppress(OSError):  # the last one removes it
        STATE.rmdir()


def _read(name: str) -> Mapping[str, Any]:
    state: Mapping[str, Any] = json.loads((STATE / name / "state.json").read_text())
    return state
