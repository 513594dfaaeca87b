"""Pid 1 of a test host: it mounts the host's private folders, then reaps orphans for ever.

It is started as a script in new namespaces (see `start.py`). The host's files are on tmpfs in its own
mount namespace, so killing this process removes the host completely.
"""

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
    for folder, children in spec["replaced_folders"]:
        _only(Path(folder), children)
    if spec["apart"]:
        _own_root(Path(spec["shared"]))
    print("ready", flush=True)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    _reap()


def _mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", "--no-mtab", *arguments], check=True)


def _own_run_and_tmp(shared: Path) -> None:
    """Mount a private /run (for the daemons' pid files and sockets), /run/tmp and /dev/shm."""
    run, shm = Path("/run"), Path("/dev/shm")
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", shm)  # the new /run; the old one is needed
    shared_in_new = shm / shared.relative_to(run)
    shared_in_new.mkdir(parents=True)
    _mount("--bind", shared, shared_in_new)
    for folder, mode in (("tmp", 0o1777), ("lock", 0o1777), ("sshd", 0o755), ("home", 0o755)):
        (shm / folder).mkdir()
        (shm / folder).chmod(mode)
    _mount("--move", shm, run)
    _mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", shm)


def _own_etc() -> None:
    """Mount a copy-on-write /etc, with users, hosts and keys of this host."""
    upper, work = Path("/run/etc/upper"), Path("/run/etc/work")
    upper.mkdir(parents=True)
    work.mkdir()
    folders = f"lowerdir=/etc,upperdir={upper},workdir={work}"
    _mount("-t", "overlay", "-o", folders, "overlay", "/etc")


def _own_sys() -> None:
    """Mount /sys again, because /sys/class/net has the interfaces of the namespace that mounted it."""
    cgroup, aside = Path("/sys/fs/cgroup"), Path("/run/cgroup")
    aside.mkdir()
    _mount("--rbind", cgroup, aside)
    _mount("-t", "sysfs", "sysfs", "/sys")
    _mount("--move", aside, cgroup)
    aside.rmdir()


def _only(folder: Path, children: list[str]) -> None:
    """Replace `folder` by one that every user can enter and that has only `children`."""
    aside = Path("/run/aside")
    aside.mkdir()
    _mount("--rbind", folder, aside)
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", folder)
    for child in children:
        (folder / child).mkdir()
        _mount("--rbind", aside / child, folder / child)
    subprocess.run(["umount", "--no-mtab", "--lazy", aside], check=True)
    aside.rmdir()


def _own_root(shared: Path) -> None:
    """Move to a root in memory that has this machine's /usr and the private folders, and nothing else."""
    subprocess.run(["umount", "--no-mtab", shared], check=True)
    root = Path("/mnt")
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", root)
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        folder = Path("/", name)
        if folder.is_symlink():
            (root / name).symlink_to(folder.readlink())
        elif folder.is_dir():
            (root / name).mkdir()
            _mount("--rbind", folder, root / name)
    for name in ("usr", "etc", "dev", "run", "proc", "sys"):
        (root / name).mkdir()
        _mount("--rbind", Path("/", name), root / name)
    for name, mode in (("tmp", 0o1777), ("root", 0o700), ("home", 0o755), ("var", 0o755)):
        (root / name).mkdir()
        (root / name).chmod(mode)
    (root / "old").mkdir()
    subprocess.run(["pivot_root", root, root / "old"], check=True)
    os.chdir("/")
    subprocess.run(["umount", "--no-mtab", "--lazy", "/old"], check=True)
    Path("/old").rmdir()


def _reap() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    while True:
        try:
            os.wait()
        except ChildProcessError:
            signal.sigwait([signal.SIGCHLD])


if __name__ == "__main__":
    main()
