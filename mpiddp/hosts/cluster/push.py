"""`mpiddp hosts push`: this folder, and the environment that runs this, to the same path on every host.

    mpiddp hosts push hostfiles/two_nodes
    mpiddp hosts push hostfiles/two_nodes --dry-run ~/project ~/miniconda3/envs/project

Files that a host has already are not sent. What was there stays until all has arrived and every checksum is
right; a push that broke off continues where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpiddp.arguments import OneSentenceParser, whole
from mpiddp.errors import DONE, FAILED, JobFailed, UserError
from mpiddp.hosts.cluster import stands_on
from mpiddp.hosts.cluster.connection import Failed
from mpiddp.hosts.cluster.fan_out import Content, FanOut, Target
from mpiddp.hosts.cluster.receive import this_platform
from mpiddp.hosts.cluster.tree import COMPILED, FOLDER, KIND, PATH, PRIVATE, Row, digest, list_tree
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.names import is_this_host, resolve_all
from mpiddp.hosts.slurm import compress_names
from mpiddp.hosts.sockets import OPEN_BESIDES, allow_open
from mpiddp.paths import cause_of
from mpiddp.text import counted, names_by_value, shown, size_text

LEFT_OUT = (".git", "runs", "data", ".venv.lock")
SAME = -1  # instead of the bytes that a host lacked
_VERB = {True: "would be sent", False: "sent"}
_FILES_PER_HOST = 6  # three of the connection, and three of one that passes on


_Tree = tuple[dict[str, Any], list[Row]]  # what the header says of it, and its files


@dataclass(frozen=True)
class Options:
    """What is pushed. `folders` are absolute. `left_out` are names in each of them that no push touches."""

    folders: tuple[str, ...]
    left_out: tuple[str, ...] = LEFT_OUT
    with_python: bool = False
    force: bool = False
    dry_run: bool = False
    min_hosts: int | None = None  # of those that have the folders in the end, this one included


@dataclass(frozen=True)
class Pushed:
    """The result: what each host lacked, and why some did not get it."""

    lacked: Mapping[Host, int]  # bytes, or SAME
    failures: Mapping[Host, str]
    sent: int
    found: int  # of these bytes, how many were on the hosts already, in older states of the files
    seconds: float
    exit_code: int = DONE  # FAILED where a host failed while the folders were sent


def add_arguments(parser: OneSentenceParser) -> None:
    parser.add_argument("file", help="the hostfile")
    parser.add_argument(
        "folders",
        nargs="*",
        metavar="FOLDER",
        help="the folders to push (default: this one, and the environment that runs this command)",
    )
    parser.add_argument("--with-data", metavar="DIR", help="push the data set in this folder too")
    parser.add_argument(
        "--with-python",
        action="store_true",
        help="push the interpreter on which an environment stands too (uv's, pyenv's)",
    )
    parser.add_argument(
        "--include",
        action="append",
        type=_entry,
        default=[],
        metavar="NAME",
        help=f"push this entry of a folder too; left out are {', '.join(LEFT_OUT[:3])} (repeatable)",
    )
    parser.add_argument(
        "--leave-out",
        action="append",
        type=_entry,
        default=[],
        metavar="NAME",
        help="leave out this entry of a folder (repeatable)",
    )
    parser.add_argument(
        "--force", action="store_true", help="overwrite a folder that is no copy of this one"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print what each host lacks; send nothing"
    )
    parser.add_argument(
        "--min-hosts",
        type=whole(1),
        metavar="H",
        help="go on without hosts that cannot take it, as long as H hosts remain",
    )


def _entry(text: str) -> str:
    """The name of an entry of a folder. A shell completes it with a slash."""
    name = text.rstrip("/")
    if not name or "/" in name:
        raise argparse.ArgumentTypeError(f"expected a name without a folder, not {shown(text)!r}")
    return name


def main(options: argparse.Namespace, hosts: Hosts) -> int:
    """Push, and print the result. Returns 1 if a host failed meanwhile that may be missing, else 0.

    Raises:
        UserError: bad input, or a host cannot take the folders. Nothing was sent.
        JobFailed: too few hosts have got them.
    """
    folders = options.folders or default_folders(str(Path.cwd()))
    folders = [*folders, *([options.with_data] if options.with_data is not None else ())]
    left_out = {*LEFT_OUT, *options.leave_out} - set(options.include)
    wanted = Options(
        tuple(dict.fromkeys(map(os.path.abspath, folders))),  # a link stays one
        tuple(sorted(left_out)),
        options.with_python,
        options.force,
        options.dry_run,
        options.min_hosts,
    )
    pushed = push(hosts.hosts, wanted)
    for host, failure in pushed.failures.items():
        print(f"{host.name}: {failure}", file=sys.stderr)
    for line in summary(pushed, options.dry_run):
        print(line)
    return pushed.exit_code


def default_folders(here: str) -> list[str]:
    """`here`, and the environment of this Python where that is elsewhere."""
    is_environment = sys.prefix != sys.base_prefix or Path(sys.prefix, "conda-meta").is_dir()
    is_inside = Path(sys.prefix).is_relative_to(here)
    return [here, sys.prefix] if is_environment and not is_inside else [here]


def summary(pushed: Pushed, dry_run: bool) -> list[str]:
    """What each host lacked, the same amounts together."""
    if not pushed.lacked and not pushed.failures:
        return ["there is no other host"]
    groups = names_by_value({host.name: lacked for host, lacked in pushed.lacked.items()})
    lines = [
        f"{compress_names(names)}: "
        + ("nothing has changed" if lacked == SAME else f"{size_text(lacked)} {_VERB[dry_run]}")
        for lacked, names in sorted(groups.items())
    ]
    if not dry_run and pushed.sent:
        found = f"; rsync found {size_text(pushed.found)} of it there" if pushed.found else ""
        lines.append(f"{size_text(pushed.sent)} in {pushed.seconds:.1f} s{found}")
    return lines


def push(hosts: Sequence[Host], options: Options) -> Pushed:
    """Make the folders of all other hosts as they are here. Hosts that already are cost one login.

    Raises:
        UserError, JobFailed: as `main`.
    """
    began = time.monotonic()
    resolve_all([host.name for host in hosts])
    others = [host for host in hosts if not is_this_host(host.name)]
    least = len(hosts) if options.min_hosts is None else options.min_hosts
    if least > len(hosts):
        raise UserError(f"--min-hosts {least}: only {counted(len(hosts), 'host')} given.")
    if not others:
        return Pushed({}, {}, 0, 0, 0.0)
    allow_open(_FILES_PER_HOST * len(others) + OPEN_BESIDES)
    named = [_named(folder, options.left_out) for folder in options.folders]
    targets: list[Target] = []
    try:
        targets += [Target.connect(host) for host in others]  # the logins take their time meanwhile
        with ThreadPoolExecutor(1 + len(targets)) as pool:
            reading = pool.submit(read_content, options)
            answers = list(pool.map(lambda each: _refusal(each, named, reading), targets))
        content = reading.result()
        refusals = {
            target.host: refusal
            for target, refusal in zip(targets, answers, strict=True)
            if refusal
        }
        if len(hosts) - len(refusals) < least:
            raise UserError(
                "\n".join(f"{host.name}: {refusal}" for host, refusal in refusals.items())
            )
        accepted = [target for target in targets if target.host not in refusals]
        lacked = {target.host: target.bytes(content) for target in accepted}
        changing = [target for target in accepted if target.lacks]
        lacked |= {target.host: SAME for target in accepted if not target.lacks}
        if options.dry_run or not changing:
            return Pushed(lacked, refusals, 0, 0, time.monotonic() - began)
        fan_out = FanOut(content, changing)
        fan_out.run(_Progress(sum(target.bytes(content) for target in changing)))
        failures = {**refusals, **fan_out.failures}
        if len(hosts) - len(failures) < least:
            raise JobFailed(
                "\n".join(f"{host.name}: {failure}" for host, failure in failures.items())
            )
        lacked = {host: count for host, count in lacked.items() if host not in failures}
        code = FAILED if fan_out.failures else DONE
        seconds = time.monotonic() - began
        return Pushed(lacked, failures, fan_out.sent, fan_out.found, seconds, code)
    finally:
        for target in targets:
            target.peer.close()


def _refusal(target: Target, named: list[dict[str, Any]], reading: Future[Content]) -> str:
    """Let the host read its folders while this one reads its own, and ask it for what it lacks."""
    try:
        target.read_ahead(named)
        target.ask(reading.result())
    except Failed as failure:
        return str(failure)
    return ""


def read_content(options: Options) -> Content:
    """The files of the folders.

    Raises:
        UserError: one cannot be pushed.
    """
    trees = [_read_tree(folder, options.left_out) for folder in options.folders]
    outside = stands_on.needs([(tree["folder"], rows) for tree, rows in trees])
    if options.with_python and (pythons := stands_on.pythons(outside)):
        trees += [_read_tree(folder, ()) for folder in pythons]
        outside = stands_on.needs([(tree["folder"], rows) for tree, rows in trees])
    trees = [
        each for each in trees if not any(_carries(other, each[0]["folder"]) for other in trees)
    ]
    header = {
        "origin": socket.gethostname(),
        "trees": [tree for tree, _ in trees],
        "needs": outside,
        "has_programs": any(stands_on.has_programs(rows) for _, rows in trees),
        "platform": this_platform(),
        "force": options.force,
    }
    return Content(header, [rows for _, rows in trees])


def _named(folder: str, left_out: Sequence[str]) -> dict[str, Any]:
    """The folder and its entries, as the header of a push names them."""
    if not Path(folder).is_dir():
        raise UserError(f"{folder} is no folder of this host. Name the folder to push.")
    home = Path.home()
    if home.is_relative_to(folder) or home.resolve().is_relative_to(Path(folder).resolve()):
        raise UserError(f"{folder} is or holds your home folder. Name the folder of a project.")
    with _unreadable():
        names = {path.name for path in Path(folder).iterdir()} - {*left_out, PRIVATE, COMPILED}
    return {"folder": folder, "names": sorted(names), "left_out": left_out}


def _read_tree(folder: str, left_out: Sequence[str]) -> _Tree:
    tree = _named(folder, left_out)
    with _unreadable():
        rows = list_tree(folder, tree["names"])
    if not rows:
        raise UserError(f"{folder} has nothing to push.")
    return {**tree, "digest": digest(rows)}, rows


@contextlib.contextmanager
def _unreadable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise cause_of(error)(f"{error.filename}: {error.strerror}.") from None


def _carries(tree: _Tree, folder: str) -> bool:
    """Whether the push of a tree brings `folder` too, which lies in it and is not left out.

    Raises:
        UserError: the path of `folder` leads out of the tree.
    """
    header, rows = tree
    inside = os.path.relpath(folder, header["folder"])
    if inside.partition("/")[0] not in header["names"]:
        return False
    if not any(row[PATH] == inside and row[KIND] == FOLDER for row in rows):
        raise UserError(
            f"{folder} leads out of {header['folder']} by a link. "
            f"Name the folder itself: {os.path.realpath(folder)}"
        )
    return True


class _Progress:
    """A line with bytes and hosts, where stderr is a terminal."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._is_shown = sys.stderr.isatty()

    def __call__(self, fan_out: FanOut) -> None:
        if self._is_shown:
            hosts = counted(len(fan_out.done), "host")
            line = f"{size_text(fan_out.sent)} of {size_text(self._total)}, {hosts} done"
            end = "\n" if fan_out.is_over else ""
            print(f"\r{line}\x1b[K", end=end, file=sys.stderr, flush=True)
