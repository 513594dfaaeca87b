"""`mpiddp hosts push`: this folder, and the environment that runs this, to the same path on every host.

    mpiddp hosts push hostfiles/two_nodes
    mpiddp hosts push hostfiles/two_nodes --dry-run ~/project ~/miniconda3/envs/project

One rsync a host. It sends what has changed, and all changes appear at the end, by renames. What it replaces
is kept in .mpiddp-replaced of the folder. What only a host has stays there, but not in the environment.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL
from typing import BinaryIO

from mpiddp.arguments import OneSentenceParser, whole
from mpiddp.errors import DONE, FAILED, JobFailed, UserError, named_by
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.names import compress_names
from mpiddp.hosts.remote import ask_hosts
from mpiddp.hosts.ssh import LOGIN, config_file, other_hosts, ssh_complaint, unnamed_file
from mpiddp.hosts.transport import SSH, Transport
from mpiddp.text import counted, names_by_value, shown, size_text

LEFT_OUT = (".git", "runs", "data", ".venv.lock")
PART, _REPLACED = ".mpiddp-part", ".mpiddp-replaced"
_EXCLUDED = ("--exclude=__pycache__", "--exclude=*.history.jsonl")  # each host has its own
_AT_ONCE = 8  # rsync processes
# -s keeps names from the shell there. Its long name differs between versions of rsync. cat, of _SHELL, cannot
# write to what does not block.
RSYNC = ("rsync", "-a", "-s", "--modify-window=-1", "--blocking-io")
FILES, SIZE = "files transferred", "Total transferred file size"  # in what --stats prints
VANISHED = 24  # rsync's exit code where a file was deleted here meanwhile

# Makes the folders on a host, and says what failed.
_PREPARE = """
import json, os, shutil
error = "" if shutil.which("rsync") else {no_rsync!a}
for folder in () if error else {folders!a}:
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as failed:
        error = "%s: %s." % (folder, failed.strerror)
print(json.dumps(error))
"""
# ssh for rsync, without what the start-up files of the shell there print before the login's line.
_SHELL = (
    f'sh -c \'ssh -F {{}} "$@" | {{{{ while IFS= read -r line; do [ "$line" = {LOGIN} ] && exec cat; '
    "done; }}' ssh"
)
_INSTALL = "rsync is not installed {}. Run{}: sudo apt-get install rsync"


@dataclass(frozen=True)
class Pushed:
    """What a push has done."""

    sent: Mapping[Host, int]  # the bytes that each host lacked; 0: nothing has changed
    failures: Mapping[Host, str]  # why some did not get them
    notes: Sequence[str]  # about hosts that have got everything
    seconds: float
    exit_code: int  # FAILED where a host failed while the folders were sent


def add_arguments(parser: OneSentenceParser) -> None:
    parser.add_argument(
        "folders",
        nargs="*",
        default=[],  # else Python before 3.12 demands one
        metavar="FOLDER",
        help="the folders to push (default: this one, and the environment that runs this command)",
    )
    parser.add_argument(
        "--leave-out",
        action="append",
        type=_entry,
        default=[],
        metavar="NAME",
        help=f"leave out this entry of a folder, as {', '.join(LEFT_OUT[:3])} (repeatable)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print what each host lacks; send nothing"
    )
    add_min_hosts(parser)


def add_min_hosts(parser: OneSentenceParser) -> None:
    goes_on = "go on without hosts that fail, as long as H hosts remain"
    parser.add_argument("--min-hosts", type=whole(1), metavar="H", help=goes_on)


def _entry(text: str) -> str:
    """The name of an entry of a folder. A shell completes it with a slash."""
    name = text.rstrip("/")
    if not name or "/" in name:
        raise argparse.ArgumentTypeError(f"expected a name without a folder, not {shown(text)!r}")
    return name


def main(options: argparse.Namespace, hosts: Hosts) -> int:
    """Push, and print the result. Returns 1 if a host failed meanwhile that may be missing, else 0."""
    folders = [os.path.abspath(each) for each in options.folders]  # noqa: PTH100 - a link stays one
    for data in (f"{each}/data" for each in folders if "data" not in options.leave_out):
        if os.path.lexists(data):  # the folder may be a data set
            to_push = f"To push it: mpiddp hosts push FILE {shlex.quote(data)}"
            print(f"{data} is left out. {to_push}", file=sys.stderr)
    pushed = push(
        hosts.hosts,
        folders or default_folders(str(Path.cwd())),
        left_out=(*LEFT_OUT, *options.leave_out),
        dry_run=options.dry_run,
        min_hosts=options.min_hosts,
        transport=hosts.transport,
    )
    for line in filter(None, [_by_host(pushed.failures), *pushed.notes]):
        print(line, file=sys.stderr)
    print("\n".join(summary(pushed, options.dry_run)))
    return pushed.exit_code


def default_folders(here: str) -> list[str]:
    """`here`, the environment of this Python, and mpiddp's checkout after pip install -e."""
    package, taken = Path(__file__).parents[2], [Path(here), *map(Path, _environment())]
    taken += [package] if "site-packages" not in package.parts else []
    return [str(each) for each in dict.fromkeys(taken) if not {*each.parents} & {*taken}]


def _environment() -> list[str]:
    """The folder of the environment of this Python, and of its interpreter if it is the user's."""
    prefix, base = Path(sys.prefix), Path(sys.base_prefix)
    is_own = prefix != base or (prefix / "conda-meta").is_dir()
    found = [*([prefix] if is_own else []), *([base] if base.is_relative_to(Path.home()) else [])]
    return [str(each) for each in dict.fromkeys(found)]


def summary(pushed: Pushed, dry_run: bool) -> list[str]:
    """What each host lacked, the same amounts together."""
    if not pushed.sent and not pushed.failures:
        return ["there is no other host"]
    verb = "would be sent" if dry_run else f"sent in {pushed.seconds:.1f} s"
    texts = {
        host.name: f"{size_text(count)} {verb}" if count else "nothing has changed"
        for host, count in pushed.sent.items()
    }
    return [f"{compress_names(names)}: {text}" for text, names in names_by_value(texts).items()]


def push(
    hosts: Sequence[Host],
    folders: Sequence[str],
    *,
    left_out: Sequence[str] = LEFT_OUT,
    dry_run: bool = False,
    min_hosts: int | None = None,
    transport: Transport = SSH,
) -> Pushed:
    """Make the folders of all other hosts as they are here, but for what they alone have.

    The environment becomes the same, also where it is within another folder. Raises UserError if a host
    cannot take them (nothing was sent), JobFailed if too few have got them.
    """
    began = time.monotonic()
    least = least_of(hosts, min_hosts)
    inside = [each for each in _environment() if any(map(Path(each).is_relative_to, folders))]
    names = {folder: _names(folder, left_out) for folder in dict.fromkeys([*folders, *inside])}
    others = other_hosts(hosts)
    check_rsync(others)
    no_rsync = _INSTALL.format("there", " there")
    prepare = _PREPARE.format(folders=[] if dry_run else [*names], no_rsync=no_rsync)
    found, unreached, _ = ask_hosts(others, prepare, transport=transport)
    refusals = {host: why.removeprefix(f"{host.name}: ") for host, why in unreached.items()}
    refusals |= {host: error for host, error in found.items() if error}
    if len(hosts) - len(refusals) < least:
        raise UserError(_by_host(refusals))

    def send(host: Host) -> int | str:
        def size(folder: str) -> int:
            return _rsync(host, folder, names[folder], inside, transport, dry_run=dry_run)

        try:
            return sum(map(size, names))
        except JobFailed as failed:
            return str(failed)

    accepted = [host for host in others if host not in refusals]
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        results = dict(zip(accepted, threads.map(send, accepted), strict=True))
    failures = {host: each for host, each in results.items() if isinstance(each, str)}
    sent = {host: each for host, each in results.items() if not isinstance(each, str)}
    if len(hosts) - len(refusals) - len(failures) < least:
        raise JobFailed(_by_host(failures))
    has_python = not dry_run and any(map(Path(sys.executable).is_relative_to, names))
    notes = _pythons([*sent], transport) if has_python else []
    seconds = time.monotonic() - began
    return Pushed(sent, {**refusals, **failures}, notes, seconds, FAILED if failures else DONE)


def least_of(hosts: Sequence[Host], min_hosts: int | None) -> int:
    """How many of the hosts must take part. Raises UserError for more than there are."""
    if min_hosts is not None and min_hosts > len(hosts):
        raise UserError(f"--min-hosts {min_hosts}: only {counted(len(hosts), 'host')} given.")
    return min_hosts or len(hosts)


def _by_host(failures: Mapping[Host, str]) -> str:
    return "\n".join(f"{host.name}: {why}" for host, why in failures.items())


def _names(folder: str, left_out: Sequence[str]) -> list[str]:
    """The entries of a folder to push. What else a host has beside them stays there."""
    path, home = Path(folder), Path.home()
    if home.is_relative_to(path) or home.resolve().is_relative_to(path.resolve()):
        raise UserError(f"{folder} is or holds your home folder. Name the folder of a project.")
    private = {*left_out, PART, _REPLACED, "__pycache__"}
    with named_by(""):
        names = sorted({each.name for each in path.iterdir()} - private)
    if not names:
        raise UserError(f"{folder} has nothing to push.")
    return names


def check_rsync(others: Sequence[Host]) -> None:
    """Raises UserError if there are other hosts, and no rsync here."""
    if others and shutil.which("rsync") is None:
        raise UserError(_INSTALL.format("here", ""))


def _rsync(
    host: Host,
    folder: str,
    names: Sequence[str],
    environment: Collection[str],  # its folders, which are sent for themselves
    transport: Transport = SSH,
    *,
    dry_run: bool = False,
) -> int:
    """Send a folder by rsync. Returns the bytes of the files that were sent. Raises JobFailed."""
    within = [os.path.relpath(each, folder) for each in environment if each != folder]
    deletes = ("--delete", "--delete-delay") if folder in environment else ()
    # A command line is too short for 100,000 names.
    with unnamed_file(b"".join(os.fsencode(f"./{each}\0") for each in names)) as stdin:
        done = rsync(
            host,
            *(*deletes, "--delay-updates", f"--partial-dir={PART}"),
            *("--backup", f"--backup-dir={folder}/{_REPLACED}", *_EXCLUDED),
            *(f"--exclude=/{each}" for each in within if not each.startswith("..")),
            *("--stats", "--no-human-readable", *(["--dry-run"] if dry_run else [])),
            *("-r", "--no-relative", "--from0", "--files-from=-"),
            *("--", f"{folder}/", f"{host.alias}:{folder}/"),
            stdin=stdin,
            transport=transport,
        )
    if done.returncode not in (DONE, VANISHED):
        raise JobFailed(why_failed(host, done))
    size, *changes = counts_of(done, SIZE, FILES, "created files", "deleted files")
    return max(1, size) if any(changes) else 0


def rsync(
    host: Host, *arguments: str, stdin: int | BinaryIO = DEVNULL, transport: Transport = SSH
) -> subprocess.CompletedProcess[str]:
    """Run rsync over ssh. Its messages are in English."""
    with config_file([host], transport) as config:
        return subprocess.run(
            [*RSYNC, f"--rsync-path=echo {LOGIN}; rsync", "-e", _SHELL.format(config), *arguments],
            env={**os.environ, "LC_ALL": "C"},
            stdin=stdin,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
        )


def counts_of(done: subprocess.CompletedProcess[str], *names: str) -> list[int]:
    """The numbers behind these names in what rsync --stats prints, 0 where there is none."""
    return [sum(map(int, re.findall(rf"{name}: (\d+)", done.stdout))) for name in names]


def why_failed(host: Host, done: subprocess.CompletedProcess[str]) -> str:
    """The sentence of an rsync that failed, without the host's name."""
    if re.search("rsync: (command not found|not found|Permission denied)", done.stderr):
        return _INSTALL.format("there", " there")
    if own := re.search(
        "(?m)^rsync: (?!.*(?:unexpectedly closed|safe_write failed))(.*)", done.stderr
    ):
        return f"{shown(own[1])} (rsync's exit code {done.returncode})"
    said = re.sub("(?m)^rsync(:| error:) .*\n?", "", done.stderr)
    return ssh_complaint(host, said).removeprefix(f"{host.name}: ")


def _pythons(hosts: Sequence[Host], transport: Transport) -> list[str]:
    """A sentence for each host on which this environment's Python does not run, or is another version."""
    program = "import sys; print('\"%d.%d\"' % sys.version_info[:2])\n"
    found, failures, _ = ask_hosts(hosts, program, python=sys.executable, transport=transport)
    here = "{}.{}".format(*sys.version_info[:2])
    others = {host: f"is Python {there} there, {here} here" for host, there in found.items()}
    wrong = {host: others[host] for host, there in found.items() if there != here}
    wrong |= dict.fromkeys(failures, "does not run there")
    fix = f"Install that Python there, or push it: mpiddp hosts push FILE {sys.base_prefix}"
    return [f"{host.name}: {sys.executable} {why}. {fix}" for host, why in wrong.items()]
