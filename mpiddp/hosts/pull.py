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
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

from mpiddp.arguments import OneSentenceParser
from mpiddp.errors import DONE, FAILED, UserError, named_by
from mpiddp.hosts import push
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.ssh import MOST_BEHIND_JUMP, other_hosts, ssh_complaint
from mpiddp.text import counted, listed, size_text

_PRIVATE = ".mpiddp-pull"  # in the run's folder: what has arrived, by host
# The files of a checkpoint by which it is verified. checkpoints/folder.py says what they hold.
_COMPLETE, _MANIFEST, _INDEX = "COMPLETE", "manifest.json", "shards.json"
_BLOCK = 1 << 20


def add_arguments(parser: OneSentenceParser) -> None:
    parser.add_argument("folder", help="the folder of the run, at the same path on every host")
    push.add_min_hosts(parser)


def main(options: argparse.Namespace, hosts: Hosts) -> int:
    """Bring everything, and print what came from where. Returns 1 if something could not be brought."""
    folder = Path(os.path.abspath(options.folder))  # noqa: PTH100 - a link stays one
    above = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not above.is_dir():
        raise UserError(f"{above} is a file; expected the folder of a run.")
    least = push.least_of(hosts.hosts, options.min_hosts)
    others = other_hosts(hosts.hosts)
    if others and shutil.which("rsync") is None:
        raise UserError("rsync is not installed here. Run: sudo apt-get install rsync")
    was_here = above == folder
    try:
        with ThreadPoolExecutor(MOST_BEHIND_JUMP) as threads:
            answers = threads.map(lambda host: _fetch(host, folder), others)
            fetched = [*zip(others, answers, strict=True)]
        unreached = [f"{host.name}: {why}" for host, why in fetched if isinstance(why, str)]
        if len(hosts.hosts) - len(unreached) < least:
            raise UserError("\n".join(unreached))
        if not was_here and all(each is None for _, each in fetched):
            raise UserError(f"{folder} is on no host.")
        if any(map(_is_checkpoint, (folder, *(_arrived(folder, host) for host in others)))):
            # Alone it would arrive file by file, and not whole or not at all.
            raise UserError(f"{folder} is a checkpoint. Pull the folder above it: {folder.parent}.")
        has_failed = bool(unreached)
        for line in unreached:
            print(line)
        for host, unread in fetched:
            if not isinstance(unread, str):
                text, problems = _place(folder, host)
                problems = [*(unread or []), *problems]
                has_failed |= bool(problems)
                for line in problems or [text]:
                    print(f"{host.name}: {line}", flush=True)
    finally:
        # What still waits for the rest of it stays.
        private = folder / _PRIVATE
        for each in [*private.glob("*"), private, *([] if was_here else [folder])]:
            with contextlib.suppress(OSError):
                each.rmdir()
    return FAILED if has_failed else DONE


def _arrived(folder: Path, host: Host) -> Path:
    return folder / _PRIVATE / host.name


def _fetch(host: Host, folder: Path) -> list[str] | str | None:
    """Bring what is not here. Returns lines about unreadable files, None without the folder, or why not."""
    arrived = _arrived(folder, host)
    with named_by(""):
        arrived.mkdir(parents=True, exist_ok=True)
    done = push.rsync(
        host, *_options(folder), "--", f"{push.rsync_target(host)}:{folder}/", f"{arrived}/"
    )
    if done.returncode in (DONE, push.VANISHED):
        return []
    # A connection that ends early is ssh's to explain, whatever exit code rsync has by then.
    errors = push.errors_of("rsync", done.stderr)
    said = [each for each in errors if "unexpectedly closed" not in each]
    if done.returncode == 255 or not said:
        return ssh_complaint(host, done.stderr).removeprefix(f"{host.name}: ")
    return None if "change_dir" in said[0] and "No such file" in done.stderr else said


def _options(folder: Path) -> list[str]:
    """Of rsync, which then leaves out what is equal in `folder`."""
    options = ["--no-links", "--no-devices", "--no-specials", "--prune-empty-dirs", "--exclude=.*"]
    return [*options, f"--partial-dir={push.PART}", f"--compare-dest={folder}"]


def _place(folder: Path, host: Host) -> tuple[str, list[str]]:
    """Give what has arrived its place. Returns what is new, and a sentence for each failure."""
    arrived = _arrived(folder, host)
    sizes, beside, problems = list[int](), list[str](), list[str]()
    try:
        for new in _pieces(arrived, folder):
            place = folder / new.relative_to(arrived)
            own = [path.stat().st_size for path in (new.iterdir() if new.is_dir() else [new])]
            try:
                places = (place, place.with_name(f"{place.name}.{host.name}"))
                goal = (_place_checkpoint if new.is_dir() else _place_file)(new, places)
            except ValueError as problem:
                problems.append(f"{place.relative_to(folder)} {problem}")
                continue
            if goal is not None:
                sizes += own
                beside += [str(goal.relative_to(folder))] if goal != place else []
        shutil.rmtree(arrived)
    except OSError as error:
        return "", [*problems, f"{error.filename}: {error.strerror}."]
    if not sizes:
        return "nothing new", problems
    text = f"{counted(len(sizes), 'file')}, {size_text(sum(sizes))}"
    if beside:
        text += f"; kept beside what differs here: {listed(sorted(beside), 3)}"
    return text, problems


def _pieces(arrived: Path, folder: Path) -> Iterator[Path]:
    """What has arrived: files, and the folders of whole checkpoints or of shards of one that is here."""
    for at, folders, names in os.walk(arrived):
        folders[:] = sorted(each for each in folders if each != push.PART)
        new = Path(at)
        is_of_one = (new / _MANIFEST).exists() and _is_checkpoint(folder / new.relative_to(arrived))
        if is_of_one or _is_checkpoint(new):
            folders.clear()
            yield new
        else:
            yield from (new / name for name in names)


def _place_file(new: Path, places: tuple[Path, Path]) -> Path | None:
    """Move a file to its place, or beside it. Returns where it is; None if it is here already."""
    free = []
    for each in places:
        is_begun = each.is_file() and _begins_equal(each, new)
        if is_begun and each.stat().st_size >= new.stat().st_size:
            return None
        if is_begun or not os.path.lexists(each):
            free.append(each)
    goal = [*free, places[1]][0]
    goal.parent.mkdir(parents=True, exist_ok=True)
    return new.replace(goal)


def _place_checkpoint(new: Path, places: tuple[Path, Path]) -> Path | None:
    """Give a checkpoint its place by one rename, joined with the shards of the same save that are here.

    Returns where it is, None if it is here already. Raises ValueError if it is damaged.
    """
    for here in places:
        replaced = here.with_name(f"{here.name}.replaced")
        if replaced.exists() and not here.exists():  # an earlier pull broke off between two renames
            replaced.rename(here)
        if not here.exists():
            _verify(new, places[0], {})
            here.parent.mkdir(parents=True, exist_ok=True)
            return new.rename(here)
        own, theirs = _manifest(here), _manifest(new)
        if theirs and theirs.items() <= own.items():
            return None
        index = new / _INDEX  # rsync brings none that is equal
        is_equal = not index.exists() or index.read_bytes() == (here / _INDEX).read_bytes()
        if own and (here / _INDEX).exists() and is_equal:
            _verify(new, here, own)
            here.rename(replaced)
            new.rename(here)
            shutil.rmtree(replaced)
            return here
    return None


def _manifest(folder: Path) -> dict[str, dict[str, str]]:
    try:
        return dict(json.loads((folder / _MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _verify(new: Path, here: Path, own: dict[str, dict[str, str]]) -> None:
    """Complete `new` with the files of `here` that rsync has not brought, and verify it.

    `own` is the manifest of the same save in `here`, which becomes a part of that of `new`. Raises ValueError
    if it is damaged.
    """
    problem = "is no complete checkpoint there: "
    try:
        theirs = _manifest(new)
        kept = {path.name for path in here.glob("*")} if own else set[str]()
        for name in {*theirs, *own, *kept} - {_COMPLETE}:
            if "/" not in name and not (new / name).exists() and (here / name).exists():
                try:
                    os.link(here / name, new / name)
                except OSError:  # exFAT, SMB and some of FUSE have no links
                    shutil.copy2(here / name, new / name)
        if own:
            text = json.dumps({**theirs, **own}, indent=1)
            (new / _MANIFEST).write_text(text, encoding="utf-8")
            (new / _COMPLETE).write_text(sha256(text.encode()).hexdigest(), encoding="utf-8")
        content = (new / _MANIFEST).read_bytes()
        if (new / _COMPLETE).read_text(encoding="utf-8") != sha256(content).hexdigest():
            raise ValueError(f"{problem}{_MANIFEST} does not match its SHA-256.")
        for name, entry in json.loads(content).items():
            digest = sha256()
            with (new / name).open("rb") as file:
                while block := file.read(_BLOCK):
                    digest.update(block)
            if digest.hexdigest() != entry["sha256"]:
                raise ValueError(f"{problem}{name} does not match its SHA-256.")
    except FileNotFoundError as error:
        raise ValueError(f"{problem}{Path(error.filename).name} is missing.") from None
    except (TypeError, KeyError, AttributeError):
        raise ValueError(f"{problem}{_MANIFEST} cannot be read.") from None


def _is_checkpoint(folder: Path) -> bool:
    """Other programs write a file COMPLETE too."""
    return (folder / _COMPLETE).is_file() and (folder / _MANIFEST).is_file()


def _begins_equal(a: Path, b: Path) -> bool:
    """Whether the shorter one is the beginning of the other."""
    with a.open("rb") as one, b.open("rb") as other:
        while (first := one.read(_BLOCK)) and (second := other.read(_BLOCK)):
            if not (first.startswith(second) or second.startswith(first)):
                return False
    return True
