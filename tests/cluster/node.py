"""Pid 1 of one test host: makes the mounts that are the host's own, then reaps orphans for ever.

It is started as a plain script inside fresh namespaces (see `standing.py`). All that the host owns
lies on tmpfs in its own mount namespace, so killing this process removes the host without a trace.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path


def main() -> None:
    spec = json.loads(sys.argv[1])
    socket.sethostname(spec["name"])
    _own_run_and_tmp(Path(spec["shared"]))
    _own_etc()
    _own_sys()
    for folder, children in spec["ways"]:
        _only(Path(folder), children)
    print("ready", flush=True)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    _reap()


def _mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", "--no-mtab", *arguments], check=True)


def _own_run_and_tmp(shared: Path) -> None:
    """A private /run (daemons' pid files and sockets), /run/tmp and /dev/shm."""
    run, shm = Path("/run"), Path("/dev/shm")
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", shm)  # made there while /run still shows
    shared_in_new = shm / shared.relative_to(run)
    shared_in_new.mkdir(parents=True)
    _mount("--bind", shared, shared_in_new)
    for folder, mode in (("tmp", 0o1777), ("lock", 0o1777), ("sshd", 0o755), ("home", 0o755)):
        (shm / folder).mkdir()
        (shm / folder).chmod(mode)
    _mount("--move", shm, run)
    _mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", shm)


def _own_etc() -> None:
    """A copy-on-write /etc: users, hosts and keys of this host are nobody else's."""
    upper, work = Path("/run/etc/upper"), Path("/run/etc/work")
    upper.mkdir(parents=True)
    work.mkdir()
    _mount(
        "-t", "overlay", "-o", f"lowerdir=/etc,upperdir={upper},workdir={work}", "overlay", "/etc"
    )


def _own_sys() -> None:
    """/sys/class/net shows the interfaces of the namespace that mounted /sys, so mount it anew."""
    cgroup, aside = Path("/sys/fs/cgroup"), Path("/run/cgroup")
    aside.mkdir()
    _mount("--rbind", cgroup, aside)
    _mount("-t", "sysfs", "sysfs", "/sys")
    _mount("--move", aside, cgroup)
    aside.rmdir()


def _only(folder: Path, children: list[str]) -> None:
    """Replaces `folder` by one that every user can enter and that holds `children` alone."""
    aside = Path("/run/aside")
    aside.mkdir()
    _mount("--rbind", folder, aside)
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", folder)
    for child in children:
        (folder / child).mkdir()
        _mount("--rbind", aside / child, folder / child)
    subprocess.run(["umount", "--no-mtab", "--lazy", aside], check=True)
    aside.rmdir()


def _reap() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    while True:
        try:
            os.wait()
        except ChildProcessError:
            signal.sigwait([signal.SIGCHLD])


if __name__ == "__main__":
    main()
