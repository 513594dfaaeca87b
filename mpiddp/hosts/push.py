"""`mpiddp hosts push`: this folder, and the environment that runs this, to the same path on every host.

    mpiddp hosts push hostfiles/two_nodes
    mpiddp hosts push hostfiles/two_nodes ~/project ~/miniconda3/envs/project

rsync sends the files that have changed, and renames them all at the end. If a file was sent by an earlier
push and deleted here, it is removed there. The files that a push replaces or removes are kept in
.mpiddp-replaced of the folder. A push never removes a file that only a host has. The Python environment is
the exception: it is made identical, so packages that only the host has are removed.
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
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from itertools import accumulate, chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from mpiddp import files
from mpiddp.arguments import Option, whole
from mpiddp.errors import DONE, JobFailed, UserError, named_by, print_error
from mpiddp.hosts import pushed
from mpiddp.hosts.complaints import Answer, failure_of, ssh_complaint
from mpiddp.hosts.containers import Image
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.names import compress_names
from mpiddp.hosts.push_image import push_image
from mpiddp.hosts.ssh import LOGIN, ask_hosts, config_file, other_hosts, program_that_prints
from mpiddp.hosts.transport import SSH, Transport
from mpiddp.text import (
    all_of,
    counted,
    escaped,
    for_these_hosts,
    from_here,
    keys_by_value,
    shown,
    size_text,
    with_fix,
)

# Conda's base, and an interpreter of pyenv, have other environments and downloads in these folders.
_OTHERS = ("envs", "pkgs")
_OF_WORK = ("data", "runs")  # a push says that it leaves them out, because a script may read them
LEFT_OUT = (".git", "runs", "data", ".venv.lock")
_SIZE_S = 0.3  # for the size of one: it may have millions of files
_REPLACED = ".mpiddp-replaced"
TRAVELLING = (files, pushed)
_MOST_LISTED = 1 << 27  # bytes of a list of paths that a host may have written,
_MOST_PATHS = 5_000_000  # and its paths
_AT_ONCE = 8  # rsync processes
# -s keeps names of files from the shell there (its long name differs between versions of rsync). rsync_ssh.sh
# needs pipes that block.
_RSYNC = (
    *("rsync", "-a", "-s", "--modify-window=-1", "--blocking-io", "--delay-updates"),
    *("--partial-dir=.mpiddp-part", "--out-format=%i %l %n"),
)
_VANISHED = 24  # rsync's exit code if a file was deleted meanwhile
_SSH = Path(__file__).with_name("rsync_ssh.sh")
_RSYNC_THERE = f'exec sh -c \'echo {LOGIN}; until [ "$line" = {LOGIN} ]; do IFS= read -r line || exit; done; exec rsync "$@"\' sh'


def parse_folder(text: str) -> str:
    """The path of a folder. "" is refused, because a variable that is not set would push this one."""
    if not text:
        raise UserError("expected a folder, not ''.")
    return os.path.abspath(text)  # noqa: PTH100 - a link stays one


def _entry(text: str) -> str:
    """The name of an entry of a folder, without the slash with which a shell completes it."""
    name = text.rstrip("/")
    if not name or "/" in name:
        raise argparse.ArgumentTypeError(f"expected a name without a folder, not {shown(text)!r}")
    return name


PURPOSE = "Make a folder, with its environment, the same on every host"
_FOLDERS = "the folders to push (default: this one, and the environment that runs this command)"
_LEAVE_OUT = f"leave out this entry of a folder, such as {', '.join(LEFT_OUT[:3])} (repeatable)"
_GOES_ON = "go on without hosts that fail, as long as H hosts remain"
OPTIONS = [
    # Without a default, Python before 3.12 demands one.
    Option("folders", value="FOLDER", nargs="*", default=[], help=_FOLDERS),
    Option("--leave-out", value="NAME", parse=_entry, repeats=True, help=_LEAVE_OUT),
    Option("--min-hosts", value="H", parse=whole(1), help=_GOES_ON),
    Option(
        "--image",
        value="IMAGE",
        parse=Image.of,
        help="push this image, and folders only if they are named",
    ),
]


def main(options: argparse.Namespace, hosts: Hosts) -> int:
    """Push, and print the result. Raises the errors of `push`."""
    if options.image and ((code := push_image(options.image, hosts)) or not options.folders):
        return code
    folders = [*map(parse_folder, options.folders)]
    began = time.monotonic()
    sent, failures, note = push(
        hosts.hosts,
        folders or default_folders(str(Path.cwd())),
        left_out=(*LEFT_OUT, *options.leave_out),
        says_first=True,
        min_hosts=options.min_hosts,
        transport=hosts.transport,
    )
    for sentence in (*failures.values(), *filter(None, [note])):
        print_error(sentence)
    sentence = summary(sent, time.monotonic() - began)
    print(sentence if sent or failures else "there is no other host")
    return DONE


def default_folders(here: str) -> list[str]:
    """`here`, the environment of this Python, and the checkout of mpiddp if pip install -e uses one.

    Raises UserError if this Python is conda's base, because that is shared by other environments.
    """
    others = [name for name in _OTHERS if Path(sys.prefix, name).is_dir()]
    if others and sys.prefix == sys.base_prefix and sys.prefix in _environment():
        sentence = f"{sys.prefix} holds other environments ({', '.join(others)})."
        fix = "activate one of its own, or name folders: mpiddp hosts push HOSTFILE FOLDER"
        raise UserError(with_fix(sentence, fix))
    package, taken = Path(__file__).parents[2], [Path(here), *map(Path, _environment())]
    taken += [package] if "site-packages" not in package.parts else []
    return [
        str(path) for path in dict.fromkeys(taken) if not any(_brings(one, path) for one in taken)
    ]


def _brings(folder: Path, path: Path) -> bool:
    """Whether a push of the folder brings this path below it along."""
    below = path.parts[len(folder.parts) :]
    return folder in path.parents and not (below[0] in _OTHERS and str(folder) in _environment())


def _environment() -> list[str]:
    """The folder of the environment of this Python, and of its interpreter if that is in the user's home."""
    prefix, base = Path(sys.prefix), Path(sys.base_prefix)
    is_own = prefix != base or (prefix / "conda-meta").is_dir()
    shared = (
        Path.home() / ".local",
        Path("/usr"),
        Path("/usr/local"),
    )  # they have other programs, too
    is_brought = base.is_relative_to(Path.home()) and base not in shared
    folders = [*([prefix] if is_own else []), *([base] if is_brought else [])]
    return [str(path) for path in dict.fromkeys(folders)]


def summary(sent: Mapping[Host, int], seconds: float) -> str:
    """A line for all hosts that have got the same amount."""
    texts = {
        host.name: f"{size_text(count)} sent in {seconds:.1f} s" if count else "nothing has changed"
        for host, count in sent.items()
    }
    lines = keys_by_value(texts).items()
    return "\n".join(f"{compress_names(names)}: {text}" for text, names in lines)


class Pushed(NamedTuple):
    """What a push has done."""

    sent: dict[Host, int]  # the bytes that each other host lacked; 0: nothing has changed
    failures: dict[Host, str]  # a sentence for each host that has not got everything
    note: str  # what a host lacks because it was left out, with the command that pushes it


def push(
    hosts: Sequence[Host],
    folders: Sequence[str],
    *,
    left_out: Sequence[str] = LEFT_OUT,
    says_first: bool = False,  # print what it is about to send
    min_hosts: int | None = None,  # so many hosts, with this one, must have them; None: all
    transport: Transport = SSH,
) -> Pushed:
    """Make the folders of all other hosts as they are here, except for files that no push has sent there.

    The environment becomes the same, even if it lies in another folder. Raises `failure_of` if too few hosts can
    take a push (then nothing is sent), and JobFailed if it has failed on too many.
    """
    if (least := min_hosts or len(hosts)) > len(hosts):
        raise UserError(f"--min-hosts {least}: only {counted(len(hosts), 'host')} given.")
    for folder in folders:
        refuse_home(Path(folder), "a project")
        with named_by(""):
            if not any(Path(folder).iterdir()):
                raise UserError(f"{folder} has nothing to push.")
    others = other_hosts(hosts)
    of_work = [f"{folder}/{name}" for folder in folders for name in _OF_WORK]
    of_work = [
        path
        for path in of_work
        if os.path.isdir(path) and path not in folders  # noqa: PTH112 - False for any error
    ]
    prepare = program_that_prints(TRAVELLING, f"prepare({folders!a}, {of_work!a})")
    answers = ask_hosts(others, prepare, transport=transport)
    failures = refusals(answers)
    if len(hosts) - len(failures) < least:
        raise failure_of([answers[host] for host in failures], failures.values())
    # The environment needs no list, because it is made identical.
    listed = [() if folder in _environment() else _paths(folder, left_out) for folder in folders]
    paths = [frozenset(of_folder) for of_folder in listed] if others else []

    def send(host: Host) -> int | str:
        parts = zip(folders, paths, answers[host].value["sent"], strict=True)
        try:
            return sum(_send(host, *part, left_out, transport) for part in parts)
        except JobFailed as failed:
            return str(failed)

    ready = [host for host in others if host not in failures]
    for folder in folders if says_first and ready else ():
        print_error(f"pushing {folder} ({_extent(folder, left_out)})")
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        results = dict(zip(ready, threads.map(send, ready), strict=True))
    failures |= {host: why for host, why in results.items() if isinstance(why, str)}
    if len(hosts) - len(failures) < least:
        raise JobFailed("\n".join(failures.values()))
    lacking = {path for host in ready for path in answers[host].value["lacks"]}
    sent = {host: size for host, size in results.items() if isinstance(size, int)}
    return Pushed(sent, failures, _note([path for path in of_work if path in lacking]))


def _note(left_out: Sequence[str]) -> str:
    """What was left out, and the command that pushes it; "" for nothing."""
    if not left_out:
        return ""
    paths = [from_here(path) for path in left_out]
    named = [f"{path}/ ({_size(path)})" for path in paths]
    command = for_these_hosts(f"mpiddp hosts push HOSTFILE {shlex.join(paths)}")
    return f"left out: {all_of(named)}. To push {'it' if len(paths) == 1 else 'them'}: {command}"


def _size(folder: str) -> str:
    """The size of a folder, or of the part of it that can be read in a moment."""
    size, until = 0, time.monotonic() + _SIZE_S
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # it is deleted meanwhile
                size += os.lstat(f"{place}/{name}").st_size
            if time.monotonic() > until:
                return f"more than {size_text(size)}"
    return size_text(size)


def refuse_home(folder: Path, expected: str) -> None:
    """Raise UserError if the folder is the home folder or holds it, because nobody means to copy that."""
    home = Path.home()
    if home.is_relative_to(folder) or home.resolve().is_relative_to(folder.resolve()):
        raise UserError(
            f"{folder} is or holds your home folder.", fix=f"name the folder of {expected}"
        )


def refusals(answers: Mapping[Host, Answer]) -> dict[Host, str]:
    """The sentences of hosts that cannot take part in a push or a pull, and of hosts that do not answer."""
    return {
        host: answer.why or f"{host.name}: {answer.value}"
        for host, answer in answers.items()
        if answer.why or isinstance(answer.value, str)
    }


def _paths(folder: str, left_out: Sequence[str]) -> Iterator[str]:
    """The files and links of a folder that a push sends, without those of another environment."""
    left_out = _left_out(folder, left_out)
    skipped = {*_environment(), *(f"{folder}/{name}" for name in left_out)} - {folder}
    for place, folders, names in os.walk(folder):
        if place in skipped:
            folders.clear()
            continue
        links = [name for name in folders if Path(place, name).is_symlink()]
        yield from (f"{place}/{name}"[len(folder) + 1 :] for name in (*names, *links))


def _left_out(folder: str, names: Sequence[str]) -> Sequence[str]:
    return (*names, *_OTHERS) if folder in _environment() else names


def _extent(folder: str, left_out: Sequence[str]) -> str:
    """How much a push of this folder compares, and whether it removes what only a host has."""
    sizes = []
    for path in _paths(folder, left_out):
        with suppress(OSError):  # it is deleted meanwhile
            sizes.append(os.lstat(f"{folder}/{path}").st_size)
    removes = ", and what only a host has is removed" if folder in _environment() else ""
    return f"{counted(len(sizes), 'file')}, {size_text(sum(sizes))}{removes}"


def _send(
    host: Host,
    folder: str,
    paths: frozenset[str],
    sent_before: str,
    left_out: Sequence[str],
    transport: Transport,
) -> int:
    """Send a folder with these paths. Remove the paths of `sent_before` (packed) that were deleted here.

    Returns 0 if nothing has changed, else the bytes of the files that the host lacked, or 1 if only other
    facts have changed, such as permissions. Raises JobFailed.
    """
    before, left_out = listed_paths(sent_before), _left_out(folder, left_out)
    deleted = {path for path in before - paths if path.partition("/")[0] not in left_out}
    environment = _environment()
    branches = (accumulate(path.split("/"), "{}/{}".format) for path in deleted)
    removable = dict.fromkeys(chain.from_iterable(branches))  # the files, and the folders above
    rules = "\0".join(f"R /{_pattern(path)}" for path in removable)
    filters = [f"--filter=R /{os.path.relpath(path, folder)}/***" for path in environment]
    filters += ["--from0", "--filter=. -", "--filter=R __pycache__/***", "--filter=P *"]
    lines = rsync(
        host,
        transport,
        *("--delete", "--delete-delay", "--omit-dir-times"),
        *(f"--exclude=/{name}" for name in (*left_out, _REPLACED, pushed.SENT)),
        # Each host has its own __pycache__, but it goes with a folder that is removed (p).
        "--filter=-p __pycache__",
        *([] if folder in environment else filters),
        *("--backup", f"--backup-dir={folder}/{_REPLACED}/{time.strftime('%Y%m%d-%H%M%S')}"),
        *("--", f"{folder}/", f"{host.alias}:{folder}/"),
        stdin=os.fsencode(rules),
    )
    sent = paths | (before - deleted)
    if sent != before:
        with TemporaryDirectory() as new:
            (file := Path(new, pushed.SENT)).write_bytes(_packed(sent))
            # Without a delay, because hosts that share a disk receive the same file at the same time.
            rsync(host, transport, "--no-delay-updates", "--", str(file), f"{host.alias}:{folder}/")
    return max(1, sum(sizes(lines))) if lines else 0


@cache
def _packed(paths: frozenset[str]) -> bytes:
    """The paths as a host keeps them, once for all hosts, because a folder may have a million files."""
    return b64encode(zlib.compress(os.fsencode("\0".join(sorted(paths)))))


def listed_paths(packed: str) -> set[str]:
    """The paths that a host says it has been sent; none if another program has written the list."""
    with suppress(ValueError, zlib.error):
        text = zlib.decompressobj().decompress(b64decode(packed), _MOST_LISTED)
        if len(text) < _MOST_LISTED and text.count(b"\0") < _MOST_PATHS:
            return {*os.fsdecode(text).split("\0")} - {""}
    return set()


def _pattern(path: str) -> str:
    """The pattern of rsync that matches this path alone. Without a wildcard, a backslash means itself."""
    return re.sub(r"([\\*?[])", r"\\\1", path) if re.search(r"[*?[]", path) else path


def rsync(host: Host, transport: Transport, *arguments: str, stdin: bytes = b"") -> list[bytes]:
    """Run rsync. Returns a line for each change: its kind, its size and the name of the file.

    Raises UserError if rsync is not installed here, or JobFailed.
    """
    if shutil.which("rsync") is None:
        raise UserError(pushed.NO_RSYNC.format("here"))
    with config_file([host], transport) as config:
        program, *options = ("ssh", "-F", config, "--") if transport.is_ssh else transport.agent
        agent = " ".join((program, *transport.at_once, *options))
        words = {"AGENT": agent, "SH": " ".join(transport.shell), "LOGIN": LOGIN}
        # The messages of rsync are in English.
        env = {**transport.environment(os.environ), **words, "LC_ALL": "C"}
        shell = f"sh {shlex.quote(str(_SSH))}"
        command = [*_RSYNC, f"--rsync-path={_RSYNC_THERE}", "-e", shell, *arguments]
        done = subprocess.run(command, env=env, input=stdin, capture_output=True)
    if done.returncode not in (DONE, _VANISHED):
        raise JobFailed(_why_failed(host, done, transport))
    return done.stdout.splitlines()


def sizes(lines: Sequence[bytes]) -> list[int]:
    """The sizes of the files that rsync has sent or received, from its lines."""
    return [int(line.split()[1]) for line in lines if re.match(rb"[<>]f", line)]


def _why_failed(host: Host, done: subprocess.CompletedProcess[bytes], transport: Transport) -> str:
    errors = done.stderr.decode(errors="replace")
    by_ssh = "unexpectedly closed|safe_write failed"  # rsync says so if ssh has ended
    if reason := re.search(f"(?m)^rsync: (?!.*(?:{by_ssh}))(.*)", errors):
        return f"{host.name}: {escaped(reason[1])} (rsync's exit code {done.returncode})"
    errors = re.sub("(?m)^rsync(:| error:) .*\n?", "", errors)
    if not transport.is_ssh:
        return transport.complaint(host.name, ["no output", *errors.strip().splitlines()][-1])
    return ssh_complaint(host, errors, transport)
