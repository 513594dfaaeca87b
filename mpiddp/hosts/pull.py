"""`mpiddp hosts pull`: a run's folder comes home from all hosts.

    mpiddp hosts pull hostfiles/two_nodes runs/x

rsync brings what is missing here: logs of other hosts' ranks, checkpoints, shards. It overwrites nothing.
What a host has appears at the end. The hosts come one by one: the manifests of two do not fit together.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path

from mpiddp.arguments import OneSentenceParser
from mpiddp.errors import DONE, FAILED, JobFailed, UserError, named_by
from mpiddp.hosts import push
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.ssh import config_file, other_hosts
from mpiddp.hosts.transport import Transport
from mpiddp.text import counted, listed, shown, size_text

_OF_A_RUN = ("--no-links", "--no-devices", "--no-specials", "--prune-empty-dirs", "--exclude=.*")
_DIFFERING = ("--dry-run", "--existing", "--size-only")
_WHERE = "the folder of the run, at the same path on every host"


def add_arguments(parser: OneSentenceParser) -> None:
    parser.add_argument("folder", type=push.parse_folder, help=_WHERE)


def main(options: argparse.Namespace, hosts: Hosts) -> int:
    """Bring everything, and print what came from where. Returns 1 if something could not be brought."""
    push.refuse_home(folder := Path(options.folder), "a run")
    missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    above = missing[-1].parent if missing else folder
    if not above.is_dir():
        raise UserError(f"{above} is a file; expected the folder of a run.")
    others, code = other_hosts(hosts.hosts), DONE
    with named_by(""):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with config_file(others, hosts.transport) as config:
            for host in others:
                try:
                    print(f"{host.name}: {_pull(host, folder, config, hosts.transport)}")
                except JobFailed as failed:
                    print(failed, file=sys.stderr)
                    code = FAILED
    finally:
        for path in missing:
            with suppress(OSError):  # it is not empty
                path.rmdir()
    if not (code or folder.exists()) and others:
        raise UserError(f"{folder} is on no host.")
    return code


def _pull(host: Host, folder: Path, config: str, transport: Transport) -> str:
    """Bring what is missing here, and say what came. Raises JobFailed."""
    paths = ("--", f"{host.alias}:{folder}/", f"{folder}/")
    done = push.rsync(config, *_OF_A_RUN, "--ignore-existing", *paths)
    if b"change_dir" in done.stderr and b"No such file" in done.stderr:
        return "nothing new"
    sizes = push.sizes_of(done)
    if done.returncode not in (DONE, push.VANISHED):
        raise JobFailed(push.why_failed(host, done, transport))
    came = f"{counted(len(sizes), 'file')}, {size_text(sum(sizes))}" if sizes else "nothing new"
    compared = push.rsync(config, *_OF_A_RUN, *_DIFFERING, *paths).stdout.splitlines()
    names = [shown(os.fsdecode(line.split(b" ", 2)[2])) for line in compared if line[:2] == b">f"]
    differing = f"; not taken, because it differs here: {listed(sorted(names), 3)}" if names else ""
    return came + differing
