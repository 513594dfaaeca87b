"""`mpiddp hosts pull`: a run's folder comes home from all hosts.

    mpiddp hosts pull hostfiles/two_nodes runs/x

It brings what is not here: logs of other hosts' ranks, checkpoints, shards. A file that differs from the one
here is kept beside it, under its host's name. Nothing here is overwritten, but a file that has grown there is
continued.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from mpiddp.arguments import OneSentenceParser, whole
from mpiddp.errors import DONE, FAILED, UserError
from mpiddp.hosts.cluster.connection import Failed, Peer
from mpiddp.hosts.cluster.fan_out import connect, sentences
from mpiddp.hosts.cluster.transfer import digest_of_file, sentence_of, take_from
from mpiddp.hosts.cluster.tree import FILE, KIND, PATH, SIZE, TIME, Row
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.names import is_this_host, resolve_all
from mpiddp.text import counted, listed, shown, size_text

# How a file here compares with one of another host. BEGINNING: the other has grown since.
SAME, MISSING, BEGINNING, OTHER = "same", "missing", "beginning", "other"

_PRIVATE = ".mpiddp-pull"  # in the run's folder: what has arrived, by host
# The files of a checkpoint by which it is verified. checkpoints/directory.py says what they hold.
_COMPLETE, _MANIFEST, _INDEX = "COMPLETE", "manifest.json", "shards.json"


def add_arguments(parser: OneSentenceParser) -> None:
    parser.add_argument("file", help="the hostfile")
    parser.add_argument("folder", help="the folder of the run, at the same path on every host")
    parser.add_argument(
        "--min-hosts",
        type=whole(1),
        metavar="H",
        help="go on without hosts that cannot be reached, as long as H hosts remain",
    )


def main(options: argparse.Namespace, hosts: Hosts) -> int:
    """Bring everything, and print what came from where. Returns 1 if something could not be brought, else 0.

    Raises:
        UserError: bad input, or a host cannot be reached. Nothing was brought.
    """
    folder = Path(os.path.abspath(options.folder))  # noqa: PTH100 - a link stays one
    above = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not above.is_dir():
        raise UserError(f"{above} is a file; expected the folder of a run.")
    least = options.min_hosts or len(hosts.hosts)
    if least > len(hosts.hosts):
        raise UserError(f"--min-hosts {least}: only {counted(len(hosts.hosts), 'host')} given.")
    resolve_all([host.name for host in hosts.hosts])
    others = [host for host in hosts.hosts if not is_this_host(host.name)]
    sources = [Source(host, folder, connect(host)) for host in others]
    try:
        with ThreadPoolExecutor(len(sources) or 1) as pool:
            list(pool.map(Source.ask, sources))
        refusals = [f"{each.host.name}: {each.failure}" for each in sources if each.failure]
        if len(hosts.hosts) - len(refusals) < least:
            raise UserError("\n".join(refusals))
        if not folder.exists() and not any(source.rows for source in sources):
            raise UserError(f"{folder} is on no host.")
        is_here = all((folder / name).exists() for name in (_COMPLETE, _MANIFEST))
        if is_here or any(_is_checkpoint("", source.rows) for source in sources):
            # Alone it would arrive file by file, and not whole or not at all.
            raise UserError(f"{folder} is a checkpoint. Pull the folder above it: {folder.parent}.")
        for source in sources:  # one after the other: the next has less to send
            for line in (source.failure or source.bring()).splitlines():
                print(f"{source.host.name}: {line}", flush=True)
    finally:
        for source in sources:
            source.peer.close()
    return FAILED if any(source.failure for source in sources) else DONE


class Source:
    """The run's folder on another host. `failure` has a line for each thing that went wrong there."""

    def __init__(self, host: Host, folder: Path, peer: Peer) -> None:
        self.host, self.peer = host, peer
        self.rows: dict[str, Row] = {}
        self.failure = ""
        self._folder = folder
        self._arrived = folder / _PRIVATE / host.name
        self._suffix = f".{host.name}"  # of what is kept beside a file or a checkpoint that differs

    def ask(self) -> None:
        """Get the rows of its files."""
        try:
            with sentences(self.host):
                self.peer.ask({"give": str(self._folder)})
                rows = self.peer.answer()["rows"]
        except Failed as failure:
            self.failure = str(failure)
            return
        self.rows = {row[PATH]: row for row in rows if row[KIND] == FILE}
        outside = [path for path in self.rows if ".." in path.split("/") or path.startswith("/")]
        if outside:
            self.failure = f"it names a file outside of the folder: {shown(outside[0])}."

    def bring(self) -> str:
        """Bring what is not here. Returns what that was, or `failure`."""
        wanted: dict[str, Row] = {}
        try:
            with sentences(self.host):
                compare = self._ask_for_digests()
                files, checkpoints = self._wanted_files(compare), self._wanted_checkpoints(compare)
                for rows in (files, *checkpoints.values()):
                    wanted |= rows
                problems = self._fetch(dict(sorted(wanted.items())))
            self._place_files(files.keys() - problems.keys())
            whole = [
                place for place, rows in checkpoints.items() if not rows.keys() & problems.keys()
            ]
            self.failure = "\n".join([*problems.values(), *self._place_checkpoints(whole)])
            if wanted and not self.failure:
                self._clear()
        except Failed as failure:
            self.failure = str(failure)
        except OSError as error:
            self.failure = sentence_of(error)
        if self.failure or not wanted:
            return self.failure or "nothing new"
        text = f"{counted(len(wanted), 'file')}, {size_text(sum(row[SIZE] for row in wanted.values()))}"
        if beside := sorted(path for path in wanted if self._suffix in path):
            text += f"; kept beside what differs here: {listed(beside, 3)}"
        return text

    def _checkpoints(self) -> dict[str, list[str]]:
        """The paths of the files of each complete checkpoint, by its folder."""
        found: dict[str, list[str]] = {}
        for path in self.rows:
            folder, slash, _ = path.rpartition("/")
            if slash and _is_checkpoint(folder + slash, self.rows):
                found.setdefault(folder, []).append(path)
        return found

    def _ask_for_digests(self) -> Compare:
        """Ask for those of files that are here too, of the part that both hosts have."""
        data = {path for files in self._checkpoints().values() for path in files}
        data = {path for path in data if not path.endswith((f"/{_MANIFEST}", f"/{_INDEX}"))}
        asked: list[tuple[str, int]] = []
        for path in self.rows.keys() - data:
            folder, _, name = path.rpartition("/")
            for place in (path, path + self._suffix, f"{folder}{self._suffix}/{name}"):
                here = self._folder / place
                if here.is_file() and not _is_whole(here, self.rows[path]):
                    asked.append((path, min(here.stat().st_size, self.rows[path][SIZE])))
        self.peer.ask({"digests": asked})
        digests = self.peer.answer()["digests"]
        return Compare(self._folder, dict(zip(asked, digests, strict=True)))

    def _wanted_files(self, compare: Compare) -> dict[str, Row]:
        """The rows to bring of what is in no checkpoint, by the paths that they get here."""
        wanted: dict[str, Row] = {}
        in_checkpoints = {path for files in self._checkpoints().values() for path in files}
        for path in self.rows.keys() - in_checkpoints:
            row = self.rows[path]
            found = {place: compare(place, row) for place in (path, path + self._suffix)}
            if SAME not in found.values():
                free = [place for place, state in found.items() if state in (MISSING, BEGINNING)]
                wanted[(free or [path + self._suffix])[0]] = row
        return wanted

    def _wanted_checkpoints(self, compare: Compare) -> dict[str, dict[str, Row]]:
        """The rows to bring of each checkpoint, by its folder here."""
        wanted: dict[str, dict[str, Row]] = {}
        for folder, files in self._checkpoints().items():
            manifest = self.rows[f"{folder}/{_MANIFEST}"]
            index = self.rows.get(f"{folder}/{_INDEX}")
            for place in (folder, folder + self._suffix):
                is_here = (self._folder / place).exists()
                if is_here and compare(f"{place}/{_MANIFEST}", manifest) == SAME:
                    break
                is_same_save = index and compare(f"{place}/{_INDEX}", index) == SAME
                if is_here and not is_same_save:
                    continue
                new = {f"{place}/{path.rpartition('/')[2]}": self.rows[path] for path in files}
                lacking = {
                    path: row for path, row in new.items() if not (self._folder / path).exists()
                }
                if lacking:
                    wanted[place] = {**lacking, f"{place}/{_MANIFEST}": manifest}
                break
        return wanted

    def _fetch(self, wanted: dict[str, Row]) -> dict[str, str]:
        """Get the files that have not arrived earlier, into a private folder.

        Returns a sentence for each file that could not be had.
        """
        left = {
            place: row for place, row in wanted.items() if not _is_whole(self._arrived / place, row)
        }
        problems: dict[str, str] = {}
        self.peer.ask({"files": [row[PATH] for row in left.values()]})
        for place, row in left.items():
            (self._arrived / place).unlink(missing_ok=True)  # a part of an earlier pull
            try:
                take_from(self.peer, str(self._arrived / place), row)
            except Failed as failure:
                problems[place] = str(failure)
        return problems

    def _place_files(self, places: Iterable[str]) -> None:
        for place in places:
            (self._folder / place).parent.mkdir(parents=True, exist_ok=True)
            (self._arrived / place).replace(self._folder / place)

    def _place_checkpoints(self, places: Iterable[str]) -> list[str]:
        """Give each its place by one rename. Returns a sentence for each that is damaged."""
        problems = []
        for place in places:
            new, here = self._arrived / place, self._folder / place
            if problem := damage(new, join=here if here.exists() else None):
                shutil.rmtree(new)
                problems.append(f"{place} is no complete checkpoint there: {problem}.")
                continue
            here.parent.mkdir(parents=True, exist_ok=True)
            if here.exists():
                old = here.rename(f"{here}.replaced")
                new.rename(here)
                shutil.rmtree(old)
            else:
                new.rename(here)
        return problems

    def _clear(self) -> None:
        shutil.rmtree(self._arrived)
        with contextlib.suppress(OSError):  # another host's files wait for their rest
            self._arrived.parent.rmdir()


class Compare(NamedTuple):
    """Compares the files here with those of a host. `digests`: by path and size, of the host's files."""

    folder: Path
    digests: dict[tuple[str, int], str | None]

    def __call__(self, place: str, row: Row) -> str:
        here = self.folder / place
        if not os.path.lexists(here):
            return MISSING
        if _is_whole(here, row):
            return SAME
        size = min(here.stat().st_size, row[SIZE]) if here.is_file() else -1
        # Without a digest for this size it has grown since it was asked for.
        digest = self.digests.get((row[PATH], size))
        if digest is None or digest_of_file(str(here), size) != digest:
            return OTHER
        return SAME if size == row[SIZE] else BEGINNING


def _is_checkpoint(prefix: str, paths: Collection[str]) -> bool:
    """Whether the paths with this prefix are a checkpoint's. Other programs write a file COMPLETE too."""
    return f"{prefix}{_COMPLETE}" in paths and f"{prefix}{_MANIFEST}" in paths


def _is_whole(path: Path, row: Row) -> bool:
    if not path.is_file():
        return False
    status = path.stat()
    return [status.st_size, status.st_mtime_ns] == [row[SIZE], row[TIME]]


def _join(here: Path, new: Path) -> None:
    """Add the files of a checkpoint to those of the same save in `new`, with one manifest of both."""
    own, theirs = (json.loads((each / _MANIFEST).read_text()) for each in (here, new))
    for path in here.iterdir():
        if path.name not in (_MANIFEST, _COMPLETE) and not (new / path.name).exists():
            os.link(path, new / path.name)
    entries = {name: entry for name, entry in theirs.items() if (new / name).exists()}
    manifest = json.dumps({**entries, **own}, indent=1)
    (new / _MANIFEST).write_text(manifest)
    (new / _COMPLETE).write_text(sha256(manifest.encode()).hexdigest())


def damage(folder: Path, *, join: Path | None) -> str:
    """Why a folder is no verified checkpoint, with the files of `join` too, or ""."""
    try:
        if join:
            _join(join, folder)
        manifest = (folder / _MANIFEST).read_bytes()
        if (folder / _COMPLETE).read_text() != sha256(manifest).hexdigest():
            return f"{_MANIFEST} does not match its SHA-256"
        for name, entry in json.loads(manifest).items():
            if digest_of_file(str(folder / name), entry["bytes"] + 1) != entry["sha256"]:
                return f"{name} does not match its SHA-256"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{_MANIFEST} cannot be read"
    return ""
