"""`mpiddp hosts push`: this folder, and the environment that runs this, to the same path on every host.

    mpiddp hosts push hostfiles/two_nodes
    mpiddp hosts push hostfiles/two_nodes ~/project ~/miniconda3/envs/project

rsync sends what has changed, and all changes of a folder appear at the end, by renames. What it replaces is
kept in .mpiddp-replaced of the folder. What only a host has stays there, but not in the environment.
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
from pathlib import Path

from mpiddp.arguments import OneSentenceParser, whole
from mpiddp.errors import DONE, JobFailed, UserError, named_by
from mpiddp.hosts.complaints import ssh_complaint
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.names import compress_names
from mpiddp.hosts.ssh import LOGIN, ask_hosts, config_file, other_hosts
from mpiddp.hosts.transport import SSH, Transport
from mpiddp.text import counted, escaped, names_by_value, shown, size_text

LEFT_OUT = (".git", "runs", "data", ".venv.lock")
PART, _REPLACED = ".mpiddp-part", ".mpiddp-replaced"
_AT_ONCE = 8  # rsync processes
# -s keeps names from the shell there. Its long name differs between versions of rsync. cat, of _SHELL, cannot
# write to what does not block.
RSYNC = ("rsync", "-a", "-s", "--modify-window=-1", "--blocking-io", "--delay-updates")
VANISHED = 24  # rsync's exit code where a file was deleted meanwhile

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


def add_arguments(parser: OneSentenceParser) -> None:
    parser.add_argument(
        "folders",
        nargs="*",
        default=[],  # else Python before 3.12 demands one
        type=parse_folder,
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
    goes_on = "go on without hosts that fail, as long as H hosts remain"
    parser.add_argument("--min-hosts", type=whole(1), metavar="H", help=goes_on)


def parse_folder(text: str) -> str:
    """The path of a folder. "", as of a variable that is not set, is none: it would be this folder."""
    if not text:
        raise argparse.ArgumentTypeError("expected a folder, not ''")
    return os.path.abspath(text)  # noqa: PTH100 - a link stays one


def _entry(text: str) -> str:
    """The name of an entry of a folder. A shell completes it with a slash."""
    name = text.rstrip("/")
    if not name or "/" in name:
        raise argparse.ArgumentTypeError(f"expected a name without a folder, not {shown(text)!r}")
    return name


def main(options: argparse.Namespace, hosts: Hosts) -> int:
    """Push, and print the result. Raises what `push` does."""
    folders = options.folders
    for data in (f"{each}/data" for each in folders if "data" not in options.leave_out):
        if os.path.lexists(data):  # the folder may be a data set
            to_push = f"To push it: mpiddp hosts push FILE {shlex.quote(data)}"
            print(f"{data} is left out. {to_push}", file=sys.stderr)
    began = time.monotonic()
    sent, failures = push(
        hosts.hosts,
        folders or default_folders(str(Path.cwd())),
        left_out=(*LEFT_OUT, *options.leave_out),
        min_hosts=options.min_hosts,
        transport=hosts.transport,
    )
    if failures:
        print(*failures.values(), sep="\n", file=sys.stderr)
    said = summary(sent, time.monotonic() - began)
    print(said if sent or failures else "there is no other host")
    return DONE


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


def summary(sent: Mapping[Host, int], seconds: float) -> str:
    """What each host lacked, the same amounts together."""
    texts = {
        host.name: f"{size_text(count)} sent in {seconds:.1f} s" if count else "nothing has changed"
        for host, count in sent.items()
    }
    lines = names_by_value(texts).items()
    return "\n".join(f"{compress_names(names)}: {text}" for text, names in lines)


def push(
    hosts: Sequence[Host],
    folders: Sequence[str],
    *,
    left_out: Sequence[str] = LEFT_OUT,
    min_hosts: int | None = None,  # that must get it, with this one; None: all
    transport: Transport = SSH,
) -> tuple[dict[Host, int], dict[Host, str]]:
    """Make the folders of all other hosts as they are here, except what only they have.

    The environment becomes the same, also where it is within another folder. Returns the bytes that each host
    lacked (0: nothing has changed), and a sentence for each that has not got everything. Raises UserError if
    too few can take it (nothing was sent), and JobFailed if too few have got it.
    """
    if (least := min_hosts or len(hosts)) > len(hosts):
        raise UserError(f"--min-hosts {least}: only {counted(len(hosts), 'host')} given.")
    names = {folder: _names(folder, left_out) for folder in dict.fromkeys(folders)}
    others = other_hosts(hosts)
    prepare = _PREPARE.format(folders=[*names], no_rsync=_INSTALL.format("there", " there"))
    answers = ask_hosts(others, prepare, transport=transport)
    failures = {host: each.why for host, each in answers.items() if each.why}
    failures |= {h: f"{h.name}: {each.value}" for h, each in answers.items() if each.value}
    if len(hosts) - len(failures) < least:
        raise UserError("\n".join(failures.values()))

    def send(host: Host) -> int | str:
        try:
            return sum(_send(host, each, names[each], config, transport) for each in names)
        except JobFailed as failed:
            return str(failed)

    accepted = [host for host in others if host not in failures]
    with config_file(hosts, transport) as config, ThreadPoolExecutor(_AT_ONCE) as threads:
        results = dict(zip(accepted, threads.map(send, accepted), strict=True))
    failures |= {host: each for host, each in results.items() if isinstance(each, str)}
    if len(hosts) - len(failures) < least:
        raise JobFailed("\n".join(failures.values()))
    return {host: each for host, each in results.items() if isinstance(each, int)}, failures


def refuse_home(folder: Path, expected: str) -> None:
    """Raise UserError for a folder that holds more than what the user means to copy."""
    home = Path.home()
    if home.is_relative_to(folder) or home.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"{folder} is or holds your home folder. Name the folder of {expected}.")


def _names(folder: str, left_out: Sequence[str]) -> list[str]:
    """The entries of a folder to push. What else a host has beside them stays there."""
    refuse_home(path := Path(folder), "a project")
    private = {*left_out, PART, _REPLACED, "__pycache__"}
    with named_by(""):
        names = sorted({each.name for each in path.iterdir()} - private)
    if not names:
        raise UserError(f"{folder} has nothing to push.")
    return names


def _send(
    host: Host,
    folder: str,
    names: Sequence[str],
    config: str,
    transport: Transport = SSH,
) -> int:
    """Send these entries of a folder. Returns the bytes of the files that the host lacked, 1 for none.

    0 means that nothing has changed. Raises JobFailed.
    """
    environment = _environment()
    within = [os.path.relpath(each, folder) for each in environment]
    kept = [*(f"--filter=R /{each}/***" for each in within), "--filter=P *"]
    done = rsync(
        config,
        *("--delete", "--delete-delay", *([] if folder in environment else kept)),
        *("--exclude=__pycache__", "--exclude=*.history.jsonl"),  # each host has its own
        *("--backup", f"--backup-dir={folder}/{_REPLACED}"),
        *("-r", "--no-relative", "--from0", "--files-from=-"),
        *("--", f"{folder}/", f"{host.alias}:{folder}/"),
        # A command line is too short for 100,000 names.
        stdin=b"".join(os.fsencode(f"./{each}\0") for each in names),
    )
    if done.returncode not in (DONE, VANISHED):
        raise JobFailed(why_failed(host, done, transport))
    return max(1, sum(sizes_of(done))) if done.stdout else 0


def rsync(config: str, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run rsync over ssh. Its messages are in English. `config` is the path of ssh's configuration.

    Raises UserError if it is not installed here.
    """
    if shutil.which("rsync") is None:
        raise UserError(_INSTALL.format("here", ""))
    own = (f"--partial-dir={PART}", "--out-format=%i %l %n")
    shell = (f"--rsync-path=echo {LOGIN}; rsync", "-e", _SHELL.format(config))
    env = {**os.environ, "LC_ALL": "C"}
    command = [*RSYNC, *own, *shell, *arguments]
    return subprocess.run(command, env=env, input=stdin, capture_output=True)


def sizes_of(done: subprocess.CompletedProcess[bytes]) -> list[int]:
    """The sizes of the files that an rsync has sent or received."""
    return [int(size) for size in re.findall(rb"(?m)^[<>]f\S+ +(\d+) ", done.stdout)]


def why_failed(host: Host, done: subprocess.CompletedProcess[bytes], transport: Transport) -> str:
    """The sentence of an rsync that failed."""
    errors = done.stderr.decode(errors="replace")
    if re.search("rsync: (command not found|not found|Permission denied)", errors):
        return f"{host.name}: {_INSTALL.format('there', ' there')}"
    if own := re.search("(?m)^rsync: (?!.*(?:unexpectedly closed|safe_write failed))(.*)", errors):
        return f"{host.name}: {escaped(own[1])} (rsync's exit code {done.returncode})"
    said = re.sub("(?m)^rsync(:| error:) .*\n?", "", errors)
    return ssh_complaint(host, said, transport)
