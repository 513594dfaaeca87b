"""`mpiddp hosts pull`: a run's folder comes home from all hosts.

    mpiddp hosts pull hostfiles/two_nodes runs/x

rsync brings what is missing here: logs of other hosts' ranks, checkpoints, shards. It overwrites nothing. The
files that make a checkpoint complete come last, from one host after the other.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from subprocess import CompletedProcess
from typing import NamedTuple

from mpiddp.arguments import OneSentenceParser
from mpiddp.errors import DONE, FAILED, UserError, named_by
from mpiddp.hosts import push
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.ssh import MOST_BEHIND_JUMP, other_hosts
from mpiddp.hosts.transport import Transport
from mpiddp.text import counted, listed, shown, size_text

# The files by which a checkpoint is complete (checkpoints/folder.py). Those of two hosts do not fit together.
_LAST = ("COMPLETE", "manifest.json")
_MISSING = "--ignore-existing", f"--partial-dir={push.PART}", "--stats", "--no-human-readable"


class _Pulled(NamedTuple):
    """What has come from a host."""

    files: int = 0
    size: int = 0  # bytes
    differing: Sequence[str] = ()  # files that are here too, with another size
    problem: str = ""  # why not all has come
    has_folder: bool = True


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
    others, transport = other_hosts(hosts.hosts), hosts.transport
    push.check_rsync(others)
    with named_by(""):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with ThreadPoolExecutor(MOST_BEHIND_JUMP) as threads:
            fetched = threads.map(lambda host: _fetch(host, folder, transport), others)
            pulled = dict(zip(others, fetched, strict=True))
        for host, (files, size, *_, problem, has_folder) in pulled.items():
            if has_folder and not problem:
                last = _run(
                    host, folder, transport, "--include=*/", *_options("include"), "--exclude=*"
                )
                pulled[host] = pulled[host]._replace(
                    files=files + last.files, size=size + last.size, problem=last.problem
                )
    finally:
        for path in (folder, *folder.parents):
            with suppress(OSError):  # it is not empty
                if path != above and above in path.parents:
                    path.rmdir()
    failed = {host: each.problem for host, each in pulled.items() if each.problem}
    if len(hosts.hosts) - sum(not pulled[host].files for host in failed) < least:
        raise UserError("\n".join(f"{host.name}: {why}" for host, why in failed.items()))
    if not folder.exists() and pulled:
        raise UserError(f"{folder} is on no host.")
    for host, each in pulled.items():
        print(f"{host.name}: {each.problem or _said(each)}")
    return FAILED if failed else DONE


def _fetch(host: Host, folder: Path, transport: Transport) -> _Pulled:
    """Bring what is missing here, but for `_LAST`, and compare the rest."""
    pulled = _run(host, folder, transport, *_options("exclude"))
    if pulled.problem or not pulled.has_folder:
        return pulled
    compare = ("--dry-run", "--existing", "--size-only", "--out-format=%n")
    done = _rsync(host, folder, transport, *compare, *_options("exclude"))
    names = [shown(each) for each in done.stdout.splitlines() if not each.endswith("/")]
    return pulled._replace(differing=names)


def _options(how: str) -> list[str]:
    return [f"--{how}={name}" for name in _LAST]


def _run(host: Host, folder: Path, transport: Transport, *options: str) -> _Pulled:
    done = _rsync(host, folder, transport, *_MISSING, *options)
    files, size = push.counts_of(done, push.FILES, push.SIZE)
    if done.returncode in (DONE, push.VANISHED):
        return _Pulled(files, size)
    if "change_dir" in done.stderr and "No such file" in done.stderr:
        return _Pulled(has_folder=False)
    return _Pulled(files, size, problem=push.why_failed(host, done))


def _rsync(host: Host, folder: Path, transport: Transport, *options: str) -> CompletedProcess[str]:
    ours = ("--no-links", "--no-devices", "--no-specials", "--prune-empty-dirs", "--exclude=.*")
    paths = (f"{host.alias}:{folder}/", f"{folder}/")
    return push.rsync(host, *ours, *options, "--", *paths, transport=transport)


def _said(pulled: _Pulled) -> str:
    came = f"{counted(pulled.files, 'file')}, {size_text(pulled.size)}"
    text = came if pulled.files else "nothing new"
    if pulled.differing:
        text += f"; not taken, because it differs here: {listed(sorted(pulled.differing), 3)}"
    return text
