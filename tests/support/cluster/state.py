"""The clusters of this machine: each has a folder under /run while it runs.

Other processes can use these folders to attach to a cluster, to take it down, or to remove the clusters of
killed processes. MPIDDP_TEST_CLUSTERS may name another folder in /run, for clusters of one run of the tests.
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

from tests.support.cluster import program
from tests.support.cluster.host import Host

STATE = Path(os.environ.get("MPIDDP_TEST_CLUSTERS", "/run/mpiddp-cluster"))

Identity = tuple[int, int | None]  # a pid and its start time identify a process


@dataclass(frozen=True)
class Cluster:
    """A running cluster.

    `shared` is a folder that has the same path on this machine and for every user of every host. The hosts
    also share the rest of the file system, except /etc, /run, /sys, /dev/shm and the home folders.
    """

    name: str
    hosts: tuple[Host, ...]
    shared: Path

    def __getitem__(self, name: str) -> Host:
        for host in self.hosts:
            if host.name == name:
                return host
        raise KeyError(f"no host {name}; there are {', '.join(host.name for host in self.hosts)}")


def identity(pid: int) -> Identity:
    return pid, program.start_time(pid)


def standing() -> list[str]:
    """The names of all clusters, including those of killed processes."""
    return sorted(path.parent.name for path in STATE.glob("[!.]*/state.json"))


def reserve(name: str) -> Path:
    """Create the folder of a new cluster, owned by this process until `record` changes it.

    Raises:
        RuntimeError: a cluster of that name exists already.
    """
    new = STATE / f".{name}.{os.getpid()}"
    while True:
        with suppress(FileNotFoundError):  # the end of the last cluster may just remove STATE
            (new / "shared").mkdir(parents=True)
            break
    (new / "shared").chmod(0o1777)
    record(new, owner=identity(os.getpid()))
    try:
        return new.rename(STATE / name)  # atomic, so no folder is ever without an owner
    except OSError:
        shutil.rmtree(new)
        raise RuntimeError(f"a cluster {name} exists already; take it down first") from None


def record(
    folder: Path,
    *,
    owner: Identity | None,
    processes: tuple[Identity, ...] = (),
    hosts: tuple[Host, ...] = (),
) -> None:
    """Write the state of a cluster. Without an owner, it does not end with any process."""
    state = {"owner": owner, "processes": processes, "hosts": [asdict(host) for host in hosts]}
    (folder / "new").write_text(json.dumps(state))
    (folder / "new").rename(folder / "state.json")


def attach(name: str) -> Cluster:
    """A cluster that another process has started. Raises FileNotFoundError if it does not exist."""
    state = _read(name)
    return Cluster(name, tuple(Host(**host) for host in state["hosts"]), STATE / name / "shared")


def alive(name: str) -> bool:
    """Whether a cluster is in use: its owner runs or, without an owner, its processes run."""
    try:
        state = _read(name)
    except FileNotFoundError:  # another process has just taken it down
        return False
    needed = [state["owner"]] if state["owner"] else state["processes"]
    return any(program.is_running(pid, started) for pid, started in needed)


def take_down(name: str) -> None:
    """End all processes of a cluster, and remove its folder. Does nothing if it does not exist."""
    try:
        processes = _read(name)["processes"]
    except FileNotFoundError:
        return
    for pid, started in processes:
        if program.start_time(pid) == started:
            if child := program.first_child(pid):  # a host's pid 1; the switch has none
                program.kill_and_wait(child, program.start_time(child))
            program.kill_and_wait(pid, started)
            program.reap(pid)
    try:
        gone = (STATE / name).rename(STATE / f".{name}.gone.{os.getpid()}")
    except FileNotFoundError:  # another process has taken it down
        return
    shutil.rmtree(gone)
    with suppress(OSError):  # other clusters are in it
        STATE.rmdir()


def _read(name: str) -> Mapping[str, Any]:
    state: Mapping[str, Any] = json.loads((STATE / name / "state.json").read_text())
    return state
