"""`mpiddp hosts push`: this folder, and the environment that runs this, to the same path on every host.

    mpiddp hosts push hostfiles/two_nodes
    mpiddp hosts push hostfiles/two_nodes --dry-run ~/project ~/miniconda3/envs/project

One rsync a host. It sends what has changed, and all changes appear at the end, by renames. What it replaces
or deletes is kept in .mpiddp-replaced of the folder. What only a host has in the folder itself stays.
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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import BinaryIO

from mpiddp.arguments import OneSentenceParser, whole
from mpiddp.errors import DONE, FAILED, JobFailed, UserError, named_by
from mpiddp.hosts.allocations import compress_names
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.remote import ask_hosts
from mpiddp.hosts.ssh import other_hosts, shell_command, ssh_options, unnamed_file
from mpiddp.text import counted, names_by_value, shown, size_text

LEFT_OUT = (".git", "runs", "data", ".venv.lock")
PART, _REPLACED, _NEW = ".mpiddp-part", ".mpiddp-replaced", ".mpiddp-new"
_EXCLUDED = ("--exclude=__pycache__", "--exclude=*.history.jsonl")  # each host has its own
_AT_ONCE = 8  # rsync processes
_ANSWER_S = 15.0
# -s keeps names from the shell there. Its long name differs between versions of rsync.
RSYNC = ("rsync", "-a", "-s", "--modify-window=-1")
VANISHED = 24  # rsync's exit code where a file was deleted here meanwhile

# Makes the folders on a host, and says whether it has rsync, and what failed.
_PREPARE = """
import json, os, shutil
error = ""
for folder in {folders!a}:
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as failed:
        error = "%s: %s." % (folder, failed.strerror)
print(json.dumps([shutil.which("rsync") is not None, error]))
"""
# A tar archive after the folder's name, which no shell interprets.
_PACK = 'printf "%s\\n" "$0"; exec tar -c "$@" --null -T -'
_UNPACK = (
    f'IFS= read -r folder; cd -- "$folder" && rm -rf {_NEW} && mkdir -p {_NEW} {_REPLACED} && '
    f"tar -x -C {_NEW} || exit; for each in {_NEW}/* {_NEW}/.[!.]*; do name=${{each##*/}}; "
    f'if [ -e "$each" ] || [ -h "$each" ]; then rm -rf -- "{_REPLACED}/$name"; '
    f'if [ -e "$name" ] || [ -h "$name" ]; then mv -- "$name" {_REPLACED}/; fi; '
    f'mv -- "$each" . || exit 1; fi; done; rmdir {_NEW}'
)


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
    )
    for line in filter(None, [_by_host(pushed.failures), *pushed.notes]):
        print(line, file=sys.stderr)
    print("\n".join(summary(pushed, options.dry_run)))
    return pushed.exit_code


def default_folders(here: str) -> list[str]:
    """`here`, the environment of this Python, its interpreter if it is the user's, and mpiddp's checkout."""
    package, prefix, base = Path(__file__).parents[2], Path(sys.prefix), Path(sys.base_prefix)
    taken = [Path(here)]
    if prefix != base or (prefix / "conda-meta").is_dir():
        taken.append(prefix)
    if base.is_relative_to(Path.home()):  # uv's, pyenv's
        taken.append(base)
    if "site-packages" not in package.parts:  # after pip install -e
        taken.append(package)
    return [str(each) for each in dict.fromkeys(taken) if not {*each.parents} & {*taken}]


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
) -> Pushed:
    """Make the folders of all other hosts as they are here.

    Raises UserError if a host cannot take them (nothing was sent), JobFailed if too few have got them.
    """
    began = time.monotonic()
    least = least_of(hosts, min_hosts)
    names = {folder: _names(folder, left_out) for folder in dict.fromkeys(folders)}
    others = other_hosts(hosts)
    prepare = _PREPARE.format(folders=[] if dry_run else [*names])
    found, unreached, _ = ask_hosts(others, prepare, timeout_s=_ANSWER_S)
    refusals = {host: why.removeprefix(f"{host.name}: ") for host, why in unreached.items()}
    refusals |= {host: error for host, (_, error) in found.items() if error}
    if len(hosts) - len(refusals) < least:
        raise UserError(_by_host(refusals))
    is_here = shutil.which("rsync") is not None
    with_rsync = {host for host, (is_there, _) in found.items() if is_here and is_there}

    def send(host: Host) -> int | str:
        by = _rsync if host in with_rsync else _tar
        try:
            return sum(by(host, folder, entries, dry_run) for folder, entries in names.items())
        except JobFailed as failed:
            return str(failed)

    accepted = [host for host in others if host not in refusals]
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        results = dict(zip(accepted, threads.map(send, accepted), strict=True))
    failures = {host: each for host, each in results.items() if isinstance(each, str)}
    sent = {host: each for host, each in results.items() if not isinstance(each, str)}
    if len(hosts) - len(refusals) - len(failures) < least:
        raise JobFailed(_by_host(failures))
    without = [host.name for host in sent if host not in with_rsync and not dry_run]
    without = ["this machine"] if without and not is_here else without
    install = "all was sent. Install it there to send changes only."
    notes = [f"{name} has no rsync: {install}" for name in without]
    if not dry_run and any(Path(sys.executable).is_relative_to(folder) for folder in names):
        notes += _pythons([*sent])
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
    private = {*left_out, PART, _REPLACED, _NEW, "__pycache__"}
    with named_by(""):
        names = sorted({each.name for each in path.iterdir()} - private)
    if not names:
        raise UserError(f"{folder} has nothing to push.")
    return names


def _rsync(host: Host, folder: str, names: Sequence[str], dry_run: bool) -> int:
    """Send a folder by rsync. Returns the bytes of the files that were sent. Raises JobFailed."""
    with _list_of(names) as stdin:
        done = rsync(
            host,
            *("--delete", "--delete-delay", "--delay-updates", f"--partial-dir={PART}"),
            *("--backup", f"--backup-dir={folder}/{_REPLACED}", *_EXCLUDED),
            *("--stats", "--no-human-readable", *(["--dry-run"] if dry_run else [])),
            *("-r", "--no-relative", "--from0", "--files-from=-"),
            *("--", f"{folder}/", f"{rsync_target(host)}:{folder}/"),
            stdin=stdin,
        )
    if done.returncode not in (DONE, VANISHED):
        raise _failed("rsync", done.returncode, done.stderr)
    stats = dict(re.findall(r"^([A-Z][a-z ]+): (\d+)", done.stdout, re.MULTILINE))
    changes = ("regular files transferred", "created files", "deleted files")
    if not any(int(stats.get(f"Number of {each}", 0)) for each in changes):
        return 0
    return max(1, int(stats["Total transferred file size"]))


def _list_of(names: Sequence[str]) -> BinaryIO:
    """A file of them for rsync or tar: a command line is too short for 100,000."""
    return unnamed_file(b"".join(os.fsencode(f"./{each}\0") for each in names))


def rsync(
    host: Host, *arguments: str, stdin: int | BinaryIO = DEVNULL
) -> subprocess.CompletedProcess[str]:
    """Run rsync over ssh. Its messages are in English."""
    return subprocess.run(
        [*RSYNC, "-e", shlex.join(ssh_options(host)), *arguments],
        env={**os.environ, "LC_ALL": "C"},
        stdin=stdin,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )


def errors_of(program: str, stderr: str) -> list[str]:
    """The sentences of rsync or tar itself, without those of ssh."""
    return [shown(line) for line in re.findall(f"^{program}: (.*)", stderr, re.MULTILINE)]


def _failed(program: str, code: int, stderr: str) -> JobFailed:
    why = [*errors_of(program, stderr), shown(["no output", *stderr.strip().splitlines()][-1])][0]
    return JobFailed(f"{why} ({program}'s exit code {code})")


def rsync_target(host: Host) -> str:
    return (replace(host, name=f"[{host.name}]") if ":" in host.name else host).ssh_target


def _tar(host: Host, folder: str, names: Sequence[str], dry_run: bool) -> int:
    """Send a folder to a host without rsync. Returns the bytes of its files. Raises JobFailed."""
    size = 1  # an empty file is sent as well
    tops = [Path(folder, name) for name in names]
    for path in (path for top in tops for path in (top, *top.rglob("*"))):
        if "__pycache__" not in path.parts and not path.name.endswith(".history.jsonl"):
            with suppress(OSError):  # tar says what it cannot read
                size += path.lstat().st_size if path.is_file() else 0
    if dry_run:
        return size
    pack, unpack = ["sh", "-c", _PACK, folder, *_EXCLUDED], shell_command(host, _UNPACK)
    with _list_of(names) as stdin, Popen(pack, cwd=folder, stdin=stdin, stdout=PIPE) as packing:
        done = subprocess.run(unpack, stdin=packing.stdout, stdout=DEVNULL, stderr=PIPE)
    if done.returncode:
        raise _failed("tar", done.returncode, done.stderr.decode(errors="replace"))
    if packing.returncode not in (0, 1):  # 1: a file has changed meanwhile
        raise JobFailed(f"not all of {folder} can be read (tar's exit code {packing.returncode})")
    return size


def _pythons(hosts: Sequence[Host]) -> list[str]:
    """A sentence for each host on which this environment's Python does not run, or is another version."""
    program = "import sys; print('\"%d.%d\"' % sys.version_info[:2])\n"
    found, failures, _ = ask_hosts(hosts, program, timeout_s=_ANSWER_S, python=sys.executable)
    here = "{}.{}".format(*sys.version_info[:2])
    others = {host: f"is Python {there} there, {here} here" for host, there in found.items()}
    wrong = {host: others[host] for host, there in found.items() if there != here}
    wrong |= dict.fromkeys(failures, "does not run there")
    fix = f"Install that Python there, or push it: mpiddp hosts push FILE {sys.base_prefix}"
    return [f"{host.name}: {sys.executable} {why}. {fix}" for host, why in wrong.items()]
