"""`mpiddp hosts pull`: a run's folder comes home from all hosts.

    mpiddp hosts pull hostfiles/two_nodes runs/x

rsync brings what is not here: logs of other hosts' ranks, checkpoints, shards. Then it is compared and gets
its place. A file that differs from the one here is kept beside it, under its host's name. Nothing here is
overwritten, but a file that has grown there is continued.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

from mpiddp.arguments import OneSentenceParser, whole
from mpiddp.errors import DONE, FAILED, UserError
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.names import is_this_host, resolve_all
from mpiddp.hosts.push import without_name
from mpiddp.hosts.ssh import MOST_BEHIND_JUMP, ssh_complaint, ssh_options
from mpiddp.text import counted, listed, shown, size_text

_PRIVATE = ".mpiddp-pull"  # in the run's folder: what has arrived, by host
# The files of a checkpoint by which it is verified. checkpoints/directory.py says what they hold.
_COMPLETE, _MANIFEST, _INDEX = "COMPLETE", "manifest.json", "shards.json"
_PART = ".mpiddp-part"
_BLOCK = 1 << 20
_SSH_FAILED, _VANISHED = 255, 24  # rsync's exit codes


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
    was_here = folder.exists()
    with ThreadPoolExecutor(MOST_BEHIND_JUMP) as threads:
        fetched = dict(zip(others, threads.map(lambda h: _fetch(h, folder), others), strict=True))
    try:
        unreached = [
            f"{host.name}: {each}" for host, each in fetched.items() if isinstance(each, str)
        ]
        if len(hosts.hosts) - len(unreached) < least:
            raise UserError("\n".join(unreached))
        if not was_here and all(each is None for each in fetched.values()):
            raise UserError(f"{folder} is on no host.")
        if any(map(_is_checkpoint, (folder, *(_arrived(folder, host) for host in others)))):
            # Alone it would arrive file by file, and not whole or not at all.
            raise UserError(f"{folder} is a checkpoint. Pull the folder above it: {folder.parent}.")
        has_failed = bool(unreached)
        for host, problems in fetched.items():
            if isinstance(problems, str):
                lines = [problems]
            else:
                try:
                    lines, failed = _place(folder, host)
                except OSError as error:
                    lines, failed = [], [f"{error.filename}: {error.strerror}."]
                lines = [*(problems or []), *failed] or lines
                has_failed |= bool(problems or failed)
            for line in lines:
                print(f"{host.name}: {line}", flush=True)
    finally:
        _remove_empty(folder, was_here)
    return FAILED if has_failed else DONE


def _arrived(folder: Path, host: Host) -> Path:
    return folder / _PRIVATE / host.name


def _fetch(host: Host, folder: Path) -> list[str] | str | None:
    """Bring what is not here. Returns a line for each file that could not be read there.

    None if the host has no such folder, a sentence if it cannot be reached.
    """
    name = f"[{host.name}]" if ":" in host.name else host.name
    target = f"{host.user}@{name}" if host.user else name
    arrived = _arrived(folder, host)
    arrived.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        _command(f"{target}:{folder}/", folder, arrived, ssh_options(host)),
        env={**os.environ, "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    if done.returncode in (DONE, _VANISHED):
        return []
    lines = done.stderr.strip().splitlines() or ["no output"]
    said = [line for line in lines if line.startswith("rsync: ")]
    if done.returncode == _SSH_FAILED or not said:
        return without_name(host, ssh_complaint(host, done.stderr))
    if "change_dir" in said[0] and "No such file" in said[0]:
        return None
    return [shown(line.removeprefix("rsync: "))[:200] for line in said]


def _command(source: str, folder: Path, arrived: Path, ssh: Sequence[str]) -> list[str]:
    """rsync from `source` to `arrived`, without what is equal in `folder`."""
    return [
        *("rsync", "-a", "--secluded-args", "--no-links", "--no-devices", "--no-specials"),
        *("--modify-window=-1", "--prune-empty-dirs", "--exclude=.*", f"--partial-dir={_PART}"),
        *(f"--compare-dest={folder}", "-e", shlex.join(ssh)),
        *("--", source, f"{arrived}/"),
    ]


def _place(folder: Path, host: Host) -> tuple[list[str], list[str]]:
    """Give what has arrived its place. Returns what is new, and a sentence for each damaged checkpoint."""
    arrived = _arrived(folder, host)
    files, beside, problems, size = 0, list[str](), list[str](), 0
    for at, folders, names in os.walk(arrived):
        folders[:] = sorted(each for each in folders if each != _PART)
        new = Path(at)
        place = folder / new.relative_to(arrived)
        if _is_checkpoint(new) or (_is_checkpoint(place) and (new / _MANIFEST).exists()):
            total = _size(new)
            found, problem = _place_checkpoint(new, place, host)
            problems += [f"{place.relative_to(folder)} {problem}"] if problem else []
            if found is not None:
                files, size = files + len(names), size + total
                beside += [str(found.relative_to(folder))] if found != place else []
            shutil.rmtree(new, ignore_errors=True)
            folders.clear()
            continue
        for name in sorted(names):
            bytes_ = (new / name).stat().st_size
            goal = _place_file(new / name, place / name, host)
            if goal is not None:
                files, size = files + 1, size + bytes_
                beside += [str(goal.relative_to(folder))] if goal.name != name else []
    shutil.rmtree(arrived)
    if not files:
        return ["nothing new"], problems
    text = f"{counted(files, 'file')}, {size_text(size)}"
    if beside:
        text += f"; kept beside what differs here: {listed(sorted(beside), 3)}"
    return [text], problems


def _place_file(new: Path, place: Path, host: Host) -> Path | None:
    """Move a file to its place, or beside it. Returns where it is; None if it is here already."""
    places = (place, place.with_name(f"{place.name}.{host.name}"))
    free = []
    for each in places:
        if not os.path.lexists(each):
            free.append(each)
        elif each.is_file() and _begins_equal(each, new):
            if each.stat().st_size >= new.stat().st_size:
                return None
            free.append(each)
    goal = free[0] if free else places[1]
    goal.parent.mkdir(parents=True, exist_ok=True)
    return new.replace(goal)


def _place_checkpoint(new: Path, place: Path, host: Host) -> tuple[Path | None, str]:
    """Give a checkpoint its place by one rename, joined with the shards of the same save that are here.

    Returns where it is, None if it is here already or is damaged, and what is wrong with it.
    """
    for here in (place, place.with_name(f"{place.name}.{host.name}")):
        replaced = here.with_name(f"{here.name}.replaced")
        if replaced.exists() and not here.exists():  # an earlier pull broke off between two renames
            replaced.rename(here)
        if here.exists():
            try:
                own, theirs = (json.loads((each / _MANIFEST).read_text()) for each in (here, new))
                is_known = theirs.items() <= own.items()
            except (OSError, ValueError, AttributeError):
                is_known = False
            if is_known:
                return None, ""
            index = new / _INDEX  # rsync brings none that is equal
            is_same_save = (here / _INDEX).exists() and (
                not index.exists() or index.read_bytes() == (here / _INDEX).read_bytes()
            )
            if not is_same_save:
                continue
        source = here if here.exists() else place
        if problem := _damage(new, source, joins=here.exists()):
            return None, f"is no complete checkpoint there: {problem}."
        here.parent.mkdir(parents=True, exist_ok=True)
        if here.exists():
            here.rename(replaced)
            new.rename(here)
            shutil.rmtree(replaced)
        else:
            new.rename(here)
        return here, ""
    return None, ""


def _damage(new: Path, here: Path, *, joins: bool) -> str:
    """Why `new` is no verified checkpoint, "" if it is.

    rsync has brought no file that is equal in `here`: they are added. `joins`: those of the same save too.
    """
    try:
        theirs = json.loads((new / _MANIFEST).read_text())
        own = json.loads((here / _MANIFEST).read_text()) if joins else {}
        for name in {*theirs, *own, *(path.name for path in here.glob("*") if joins)} - {_COMPLETE}:
            if "/" not in name and not (new / name).exists() and (here / name).exists():
                _link(here / name, new / name)
        if joins:
            manifest = json.dumps({**theirs, **own}, indent=1)
            (new / _MANIFEST).write_text(manifest)
            (new / _COMPLETE).write_text(sha256(manifest.encode()).hexdigest())
        content = (new / _MANIFEST).read_bytes()
        if (new / _COMPLETE).read_text() != sha256(content).hexdigest():
            return f"{_MANIFEST} does not match its SHA-256"
        for name, entry in json.loads(content).items():
            if _sha256(new / name) != entry["sha256"]:
                return f"{name} does not match its SHA-256"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{_MANIFEST} cannot be read"
    return ""


def _link(path: Path, to: Path) -> None:
    try:
        os.link(path, to)
    except OSError:  # exFAT, SMB and some of FUSE have no links
        shutil.copy2(path, to)


def _is_checkpoint(folder: Path) -> bool:
    """Other programs write a file COMPLETE too."""
    return (folder / _COMPLETE).is_file() and (folder / _MANIFEST).is_file()


def _begins_equal(a: Path, b: Path) -> bool:
    """Whether the shorter one is the beginning of the other."""
    left = min(a.stat().st_size, b.stat().st_size)
    with a.open("rb") as one, b.open("rb") as other:
        while left:
            size = min(left, _BLOCK)
            if one.read(size) != other.read(size):
                return False
            left -= size
    return True


def _sha256(path: Path) -> str:
    digest = sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _remove_empty(folder: Path, was_here: bool) -> None:
    """Remove the private folder, but for what still waits for the rest of it."""
    private = folder / _PRIVATE
    for each in [*private.glob("*"), private, *([] if was_here else [folder])]:
        with contextlib.suppress(OSError):
            each.rmdir()
