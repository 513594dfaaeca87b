"""`mpiddp hosts pull`: bring a run's folder home from all hosts.

    mpiddp hosts pull hostfiles/two_nodes runs/x

rsync brings files that are missing here, for example logs of other hosts' ranks, and those that have only
grown since they came. It overwrites nothing else. It asks one host after the other, because two hosts may
have manifests that do not fit together.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from mpiddp.arguments import Option
from mpiddp.errors import DONE, FAILED, JobFailed, UserError, named_by, print_error
from mpiddp.hosts import push, pushed
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.ssh import ask_hosts, other_hosts, program_that_prints
from mpiddp.hosts.transport import Transport
from mpiddp.text import counted, listed, shown, size_text

_OF_A_RUN = ("--no-links", "--no-devices", "--no-specials", "--prune-empty-dirs", "--exclude=.*")

OPTIONS = [
    Option(
        "folders",
        value="FOLDER",
        nargs="+",
        help="the folder of the run, at the same path on every host",
    )
]


def main(options: argparse.Namespace, hosts: Hosts) -> int:
    """Bring the folder from every host, and print how much came. Returns 1 if a host failed."""
    if len(options.folders) != 1:
        raise UserError(f"mpiddp hosts pull: expected one folder, not {len(options.folders)}.")
    push.refuse_home(folder := Path(push.parse_folder(options.folders[0])), "a run")
    others = other_hosts(hosts.hosts)
    program = program_that_prints(push.TRAVELLING, f"has({str(folder)!a})")
    answers = ask_hosts(others, program, transport=hosts.transport)
    failures = push.refusals(answers)
    have_it = {host: answers[host].value for host in others if host not in failures}
    if others and not (any(have_it.values()) or failures or folder.exists()):
        raise UserError(f"{folder} is on no host.")
    for host, has_it in have_it.items():
        try:
            came = _pull(host, folder, hosts.transport) if has_it else "nothing new"
            print(f"{host.name}: {came}")
        except JobFailed as failed:
            failures[host] = str(failed)
    for sentence in failures.values():
        print_error(sentence)
    return FAILED if failures else DONE


def _pull(host: Host, folder: Path, transport: Transport) -> str:
    """Bring the missing files from a host. Returns a sentence about them. Raises JobFailed."""
    with named_by(""):
        folder.mkdir(parents=True, exist_ok=True)
    paths = ("--", f"{host.alias}:{folder}/", f"{folder}/")
    sizes = push.sizes(push.rsync(host, transport, *_OF_A_RUN, "--ignore-existing", *paths))
    came = f"{counted(len(sizes), 'file')}, {size_text(sum(sizes))}" if sizes else "nothing new"
    differing = ("--dry-run", "--existing", "--size-only")
    compared = push.rsync(host, transport, *_OF_A_RUN, *differing, *paths)
    names = {os.fsdecode(line.split(b" ", 2)[2]) for line in compared if line[:2] == b">f"}
    # rsync writes an odd name in another way.
    known = [name for name in sorted(names) if (folder / name).is_file()]
    begin = [(name, *pushed.beginning(folder / name)) for name in known]
    program = program_that_prints(push.TRAVELLING, f"grown({str(folder)!a}, {begin!a})")
    grown = (ask_hosts([host], program, transport=transport)[host].value or ()) if names else ()
    if grown:  # files that were pulled while the job ran
        chosen = ("--from0", "--files-from=-", *paths)
        push.rsync(host, transport, *_OF_A_RUN, *chosen, stdin=os.fsencode("\0".join(grown)))
        came = f"{came}, {counted(len(grown), 'file')} went on"
    left = [shown(name) for name in sorted(names - {*grown})]
    return came + (f"; not taken, because it differs here: {listed(left, 3)}" if left else "")
