"""The receiving end of a push. `mpiddp hosts push` sends this source to each host.

Everything arrives in a private folder inside the copy. It takes its place by renames, once it is complete
and every checksum is right, so that a push that breaks off leaves what was there, and the next one
continues. It needs Python 3.8 and the standard library.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import os
import shlex
import sys
from typing import Any

from mpiddp.hosts.cluster import rsync
from mpiddp.hosts.cluster.connection import Failed, listen, tell
from mpiddp.hosts.cluster.transfer import give, pass_on, sentence_of, take_file
from mpiddp.hosts.cluster.tree import (
    COMPILED,
    FILE,
    FOLDER,
    HISTORY,
    KIND,
    LINK,
    MODE,
    PATH,
    PRIVATE,
    SIZE,
    TARGET,
    TIME,
    Row,
    by_name,
    digest,
    list_all,
    list_tree,
    remove,
)

_BLOCK = 4096  # what a file takes at least


def main(program: bytes) -> None:
    """Serve one sender on stdin and stdout."""
    gc.disable()  # rows have no cycles, and a search for some among so many takes a tenth of the time
    try:
        message = listen()
        if "pass_on" in message:
            pass_on(program, message)
        elif "give" in message:
            give(message["give"])
        else:
            _receive(message)
    except EOFError:  # the sender is gone
        sys.exit(1)
    except Failed as failure:
        tell({"failed": str(failure)})
    except OSError as error:
        tell({"failed": sentence_of(error)})


def _receive(message: dict[str, Any]) -> None:
    ahead = [(tree, _rows_there(tree)) for tree in message.get("read", ())]
    header = listen() if "read" in message else message
    copies = []
    for tree in header["trees"]:
        read = [rows for named, rows in ahead if {**named, "digest": tree["digest"]} == tree]
        copies.append(Copy(tree, header["origin"], read[0] if read else _rows_there(tree)))
    differing = [index for index, copy in enumerate(copies) if not copy.is_same()]
    if differing:
        _check_platform(header)
        for index in differing:
            copies[index].check_place(force=header["force"])
    _check_needs(header["needs"])
    tell({"differs": differing})
    if not differing:
        return
    changing = [copies[index] for index in differing]
    lacks = []
    for copy, rows in zip(changing, listen()["rows"]):
        copy.rows = rows
        copy.check_entries(force=header["force"])
        lacks.append(copy.lacks())
    _check_space(changing, lacks)
    tell({"lacks": lacks})
    # The end of a dry run, or of a push that another host has refused, ends this process.
    go = listen()
    for copy in changing:
        copy.begin()
    if go.get("rsync"):
        lacks = _let_rsync_bring(changing, lacks)
    for copy, indices in zip(changing, lacks):
        copy.ahead.close()
        for index in indices:
            row = copy.rows[index]
            take_file(copy.place_of(row), row, sys.stdin.buffer)
            if os.stat(copy.place_of(row)).st_mtime_ns != row[TIME]:
                raise Failed(
                    f"{copy.folder} is on a file system that keeps no nanoseconds. Use another."
                )
    for copy in changing:
        copy.complete()
    for copy in changing:
        copy.replace()
    tell({"done": True})


def _let_rsync_bring(changing: list[Copy], lacks: list[list[int]]) -> list[list[int]]:
    """Wait until the sender's rsync has ended. Returns what the copies lack then."""
    if not rsync.is_here():
        tell({"rsync": False})
        return lacks
    for copy, indices in zip(changing, lacks):
        copy.ahead.open([copy.rows[index] for index in indices])
    tell({"rsync": True})
    listen()
    for copy in changing:
        copy.take_ahead()
    lacks = [copy.lacks() for copy in changing]
    tell({"lacks": lacks})
    return lacks


def _check_platform(header: dict[str, Any]) -> None:
    """Raise Failed where the sender's programs cannot run."""
    theirs, own = header["platform"], this_platform()
    if not header["has_programs"] or theirs == own:
        return
    if theirs["machine"] != own["machine"]:
        raise Failed(
            f"its CPU is {own['machine']}, and the programs of the folder are for "
            f"{theirs['machine']}. Set the folder up there by itself."
        )
    if own["glibc"] < theirs["glibc"]:
        here, there = (".".join(map(str, each["glibc"])) for each in (own, theirs))
        raise Failed(
            f"its glibc is {here or 'another library'}, older than {there} here. "
            "Set the folder up on the host with the oldest system, and push from there."
        )


def this_platform() -> dict[str, Any]:
    """The machine's architecture, and the version of glibc: [] for another library."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        glibc = [int(part) for part in version.split(".")] if name == "glibc" else []
    except (OSError, ValueError):
        glibc = []
    return {"machine": os.uname().machine, "glibc": glibc}


def _check_needs(needs: list[list[str]]) -> None:
    """Raise Failed where a path outside of the folders, to which they lead, is missing."""
    missing = [each for each in needs if not os.path.exists(each[0])]
    if missing:
        path, user = missing[0]
        more = f" ({len(missing)} such paths)" if len(missing) > 1 else ""
        raise Failed(
            f"{path} is missing there, and {user} leads to it{more}. "
            "Install it there, push it too, or, if it is a Python, add --with-python."
        )


def _check_space(copies: list[Copy], lacks: list[list[int]]) -> None:
    needed: dict[int, int] = {}
    free: dict[int, int] = {}
    place: dict[int, str] = {}
    for copy, indices in zip(copies, lacks):
        above = _nearest(copy.folder)
        device = os.stat(above).st_dev
        status = os.statvfs(above)
        free.setdefault(device, status.f_bavail * status.f_frsize)
        free[device] += copy.unusable()
        place.setdefault(device, copy.folder)
        sizes = (copy.rows[index][SIZE] for index in indices)
        needed[device] = needed.get(device, 0) + sum(size + _BLOCK for size in sizes)
    for device, size in needed.items():
        if size > free[device]:
            raise Failed(
                f"{place[device]} needs {size / 1e6:.1f} MB there, and {free[device] / 1e6:.1f} "
                "MB are free."
            )


def _nearest(folder: str) -> str:
    """The folder, or the nearest above it that exists."""
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    return folder


def _rows_there(tree: dict[str, Any]) -> list[Row]:
    """What the folder here has of the sender's entries, and of those of an earlier push."""
    before = {*_read_record(tree["folder"]).get("names", ())} - {*tree["left_out"], PRIVATE}
    return list_tree(tree["folder"], before | {*tree["names"]})


def _read_record(folder: str) -> dict[str, Any]:
    try:
        with open(os.path.join(folder, PRIVATE, "copy.json"), encoding="utf-8") as file:
            record: dict[str, Any] = json.load(file)
    except (OSError, ValueError):
        return {}
    return record


class Copy:
    """A folder of this host that is to become as the sender's. `rows` are what the sender has in it."""

    def __init__(self, tree: dict[str, Any], origin: str, has: list[Row]) -> None:
        self.folder: str = tree["folder"]
        self.names: list[str] = tree["names"]
        self._digest: str = tree["digest"]
        self._left_out: list[str] = [*tree["left_out"], PRIVATE]
        self._origin = f"{origin}:{self.folder}"
        self._private = os.path.join(self.folder, PRIVATE)
        self._new = os.path.join(self._private, "new")
        self._old = os.path.join(self._private, "old")
        self.ahead = rsync.Ahead(self.folder)
        self._record = _read_record(self.folder)
        self.has = has
        self.rows: list[Row] = []

    def _write_record(self, names: list[str]) -> None:
        path = os.path.join(self._private, "copy.json")
        with open(path + ".new", "w", encoding="utf-8") as file:
            json.dump({"origin": self._origin, "names": names}, file)
        os.replace(path + ".new", path)

    def is_same(self) -> bool:
        return digest(self.has) == self._digest

    def check_place(self, *, force: bool) -> None:
        """Raise Failed where the folder cannot be written, or is no copy of the sender's."""
        above = _nearest(self.folder)
        if not os.path.isdir(above):
            raise Failed(f"{above} is a file there; expected a folder.")
        if not os.access(above, os.W_OK | os.X_OK):
            raise Failed(f"{above} may not be written there. Give it to the user of ssh: chown.")
        if above != self.folder or force or self._record.get("origin") == self._origin:
            return
        if foreign := sorted(set(os.listdir(self.folder)) - set(self._left_out)):
            other = self._record.get("origin")
            what = f"a copy of {other}" if other else f"no copy of this one (it has {foreign[0]})"
            raise Failed(f"{self.folder} is {what}. To overwrite it: --force")

    def check_entries(self, *, force: bool) -> None:
        """Raise Failed where what was never pushed, such as what a job has written, is in the way."""
        has, wanted = by_name(self.has), by_name(self.rows)
        own = has.keys() - set(self._record.get("names", ()))
        differing = sorted(name for name in own & wanted.keys() if has[name] != wanted[name])
        if differing and not force:
            path = os.path.join(self.folder, differing[0])
            raise Failed(
                f"{path} was never pushed and differs. Rename it there, leave it out (--leave-out "
                f"{shlex.quote(differing[0])}), or overwrite it: --force"
            )

    def lacks(self) -> list[int]:
        """The rows of the files that are neither here nor have arrived in an earlier push."""
        here = {tuple(row) for row in self.has}
        here |= {tuple(row) for row in (*self._arrived(), *self.ahead.arrived())}
        return [
            index
            for index, row in enumerate(self.rows)
            if row[KIND] == FILE and tuple(row) not in here
        ]

    def _arrived(self) -> list[Row]:
        return list_all(self._new)

    def unusable(self) -> int:
        """Bytes that an earlier push has left and that this one removes."""
        wanted = {tuple(row) for row in self.rows}
        left = (*self._arrived(), *self.ahead.arrived(), *self.ahead.parts())
        return sum(row[SIZE] for row in left if tuple(row) not in wanted)

    def begin(self) -> None:
        """Make the private folder. From here on this is a copy of the sender's folder, whatever happens."""
        os.makedirs(self._new, exist_ok=True)
        self._lock = os.open(self._private, os.O_RDONLY)  # held until this process ends
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Failed(f"another push to {self.folder} is running there.") from None
        wanted = {row[PATH]: row for row in self.rows}
        for row in self._arrived():  # of another state of the sender, or not whole
            path, right = os.path.join(self._new, row[PATH]), wanted.get(row[PATH])
            if right and right[KIND] == row[KIND] == FOLDER:
                os.chmod(path, 0o700)  # for what is still to arrive
            elif right != row:
                remove(path)
        self.take_ahead()
        self._write_record(sorted({*self._record.get("names", ()), *self.names}))

    def take_ahead(self) -> None:
        """Move what rsync has brought to where the files arrive."""
        self.ahead.move(self.rows, self._new)

    def place_of(self, row: Row) -> str:
        """Where a file arrives."""
        return os.path.join(self._new, row[PATH])

    def complete(self) -> None:
        """Make the entries that change complete, with links to the files that stay as they are."""
        has, wanted = by_name(self.has), by_name(self.rows)
        self._changed = {name for name in wanted if wanted[name] != has.get(name)}
        rows = [row for row in self.rows if row[PATH].partition("/")[0] in self._changed]
        for row in rows:
            path, old = os.path.join(self._new, row[PATH]), os.path.join(self.folder, row[PATH])
            if row[KIND] == FOLDER:
                os.makedirs(path, exist_ok=True)
                os.chmod(path, 0o700)
                self._keep_own(path, old)
            elif not os.path.lexists(path):
                os.symlink(row[TARGET], path) if row[KIND] == LINK else _link(old, path)
        for row in reversed(rows):
            if row[KIND] == FOLDER:
                os.chmod(os.path.join(self._new, row[PATH]), row[MODE])
        arrived = [row for row in self._arrived() if row[PATH].partition("/")[0] in self._changed]
        if arrived != rows:
            raise Failed(f"{self.folder} changed there while it was pushed. Push again.")

    def _keep_own(self, path: str, old: str) -> None:
        """Link what no push brings: compiled files, and histories of hosts."""
        kept, compiled = os.path.join(path, COMPILED), os.path.join(old, COMPILED)
        if os.path.isdir(compiled) and not os.path.lexists(kept):
            os.mkdir(kept)
            _link_files(compiled, kept, "")
        if os.path.isdir(old):
            _link_files(old, path, HISTORY)

    def replace(self) -> None:
        """Put the new entries in the place of the old ones."""
        remove(self._old)
        os.mkdir(self._old)
        gone = set(by_name(self.has)) - set(self.names)
        names = sorted(self._changed | gone)
        for name in names:  # before the first of them moves
            for above in (self.folder, self._new):
                _make_movable(os.path.join(above, name))
        modes = {row[PATH]: row[MODE] for row in self.rows if row[KIND] == FOLDER}
        for name in names:
            here = os.path.join(self.folder, name)
            if os.path.lexists(here):
                os.rename(here, os.path.join(self._old, name))
            if name in self._changed:
                os.rename(os.path.join(self._new, name), here)
                if name in modes:
                    os.chmod(here, modes[name])
        self._write_record(self.names)
        remove(self._old)
        remove(self._new)


def _link(old: str, new: str) -> None:
    try:
        os.link(old, new)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EXDEV, errno.ENOTSUP, errno.EMLINK):
            raise
        import shutil  # only where it is needed, as in `connection.Peer`

        shutil.copy2(old, new)


def _link_files(old: str, new: str, ending: str) -> None:
    """Link the files of a folder whose names end so."""
    for name in os.listdir(old):
        here, there = os.path.join(old, name), os.path.join(new, name)
        if name.endswith(ending) and os.path.isfile(here) and not os.path.lexists(there):
            _link(here, there)


def _make_movable(path: str) -> None:
    """Only a folder that may be written can get another parent."""
    if os.path.isdir(path) and not os.path.islink(path) and not os.access(path, os.W_OK):
        os.chmod(path, 0o700)
