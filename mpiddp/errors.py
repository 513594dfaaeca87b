"""UserError and JobFailed, which print as one sentence without a traceback, and the exit codes.

Any other exception is a bug or a failed job and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TextIO

from mpiddp.text import FIX, escaped, with_fix

DONE = 0  # every rank ended with exit code 0
FAILED = 1  # a rank, a host, a disk or the network failed: read the error line
BAD_INPUT = 2  # an option, a file or a host cannot be used: do what the line says
STOPPED = 75  # all ranks saved and left after `should_stop`: run the command after `to resume`
INTERRUPTED = 130  # a second Ctrl-C, a script without `should_stop`, or one slower than `--grace`

# The errors of a wrong path or command. A machine causes all others, for example its disk.
_WRONG = {
    *(errno.E2BIG, errno.EACCES, errno.EEXIST, errno.EFBIG, errno.EINVAL, errno.EISDIR),
    *(errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOEXEC, errno.ENOTDIR, errno.EPERM),
}

_OF_LIMITS = {errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM}
MORE_PROCESSES = "raise ulimit -u, or pids.max of the container"

# The beginning of sentences, for example of argparse, in whose place `message` puts "mpiddp: ".
_PREFIX = re.compile("^mpiddp(: | launch: | (?=[a-z][a-z -]*: ))")

_FAILED_AIDS = set[str]()

# The extra of this distribution that installs a package.
EXTRA_OF = {**dict.fromkeys(("torch", "numpy", "mpi4py", "PIL"), "train"), "cloudpickle": "spawn"}


class _Sentence(Exception):
    """An error that is printed as one sentence, and below it `fix`, the command that mends it."""

    def __init__(self, sentence: str, *rest: object, fix: str = "") -> None:
        super().__init__(with_fix(sentence, fix), *rest)


class UserError(_Sentence):
    """Bad input, as one sentence: what was found and what was expected; `fix` is the command that mends it.

    The command line prints it on stderr, once per job, and exits with code 2. A script may raise it too:
    then all ranks end with code 2, and the job is not restarted.
    """


class JobFailed(_Sentence):
    """A fault of a machine, the network or another rank in a job that has started, as one sentence.

    The exit code is 1, and `--max-restarts` restarts the job. A script may raise it too, with a sentence that
    says what has failed.
    """


class RankFailed(JobFailed):
    """A rank of `mpiddp.spawn` has failed, and it was the first. `__cause__` is its exception.

    `__cause__` is None if the rank ended without an exception (a signal, `os._exit`, a host that is lost), or
    if the exception cannot be pickled there or unpickled here.

    Attributes:
        rank: the rank that failed first, in [0, world_size).
        hostname: the name of its host.
        traceback: its traceback as text, "" if it ended without an exception. `str()` has it behind the
            error line of the launcher.
    """

    def __init__(self, sentence: str, rank: int, hostname: str, traceback: str = "") -> None:
        super().__init__(sentence, rank, hostname, traceback)  # so that it can be pickled
        self.rank = rank
        self.hostname = hostname
        self.traceback = traceback

    def __str__(self) -> str:
        sentence = str(self.args[0])
        return f"{sentence}\n\n{self.traceback.rstrip()}" if self.traceback else sentence


class NoAnswer(JobFailed):
    """A rank is silent, so the ranks cannot agree."""


def missing_package(error: BaseException, user: str) -> str:
    """The sentence for a package of an extra that mpiddp itself failed to import; "" for any other error.

    `user` is what needs the package. The sentence has the command that installs it.
    """
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package not in EXTRA_OF:
        return ""
    packages = [name.partition(".")[0] for name in _modules_of(error)]
    if [name for name in packages if name != "importlib"][-1:] != ["mpiddp"]:  # the importer
        return ""
    return with_fix(
        f"{user} needs {package}, which {sys.executable} does not have.",
        f"{sys.executable} -m pip install '{_source()}[{EXTRA_OF[package]}]'",
    )


def _modules_of(error: BaseException) -> list[str]:
    """The modules through which the error came, that of its origin last."""
    return [str(each.tb_frame.f_globals.get("__name__")) for each in _places(error)]


def _places(error: BaseException) -> list[TracebackType]:
    """The places through which the error came, its origin last. The module `traceback` takes 5 ms."""
    places, place = list[TracebackType](), error.__traceback__
    while place is not None:
        places.append(place)
        place = place.tb_next
    return places


def import_package(package: str, user: str) -> ModuleType:
    """Import a package of an extra. Raises UserError if it is not installed."""
    try:
        __import__(package)  # importlib would load three more modules before a script's first line
        return sys.modules[package]
    except ModuleNotFoundError as error:
        if sentence := missing_package(error, user):
            raise UserError(sentence) from None
        raise


def _source() -> str:
    """The source for pip: the checkout from which this mpiddp was installed, as there is no release yet."""
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "setup.py").is_file():
        return str(checkout)
    import json  # only this error needs them
    from importlib.metadata import PackageNotFoundError, distribution

    with contextlib.suppress(PackageNotFoundError, KeyError, ValueError):
        url = json.loads(distribution("mpiddp").read_text("direct_url.json") or "")["url"]
        return str(url).removeprefix("file://")
    return "mpiddp"


def fault(error: BaseException) -> str:
    """An error of mpiddp itself, for one line: "ZeroDivisionError: division by zero (pace.py:49)"."""
    what, places = f"{type(error).__name__}: {error}".rstrip(": "), _places(error)
    if not places:
        return what
    file = Path(places[-1].tb_frame.f_code.co_filename).name
    return f"{what} ({file}:{places[-1].tb_lineno})"


@contextlib.contextmanager
def aid(what: str, say: Callable[[str], None] | None = None) -> Iterator[None]:
    """A body that only helps the job. If it fails, one line says so once, and the job goes on without it.

    `say` prints the line; without it, it goes to stderr.
    """
    try:
        yield
    except Exception as error:
        if what not in _FAILED_AIDS:
            _FAILED_AIDS.add(what)
            (say or print_error)(f"no {what}: {type(error).__name__}: {error}. The job goes on.")


def print_from_one_rank(sentence: str, rank: int, local_rank: int | None) -> None:
    """Print a sentence that every rank may have, without communication. The caller then exits.

    Rank 0 prints at once, and its exit makes most launchers end the other ranks. After a pause, the first
    rank of each host that still runs prints too, because the problem may be of that host alone. If the local
    rank is unknown (None), every rank prints.
    """
    if rank != 0:
        time.sleep(2.0)
    if rank == 0 or not local_rank:
        print_error(sentence)


def print_error(error: str | Exception) -> None:
    """Print a message on stderr. Each line of it begins with "mpiddp: "."""
    print_line(message(str(error)), sys.stderr)


def message(sentence: str) -> str:
    """The lines of a message, without effects on a terminal, because the text may come from outside.

    "mpiddp hosts: no such file" becomes "mpiddp: hosts: no such file". Lines after the first are
    indented, and the line with a fix has no prefix.
    """
    first, *others = escaped(without_prefix(sentence), keep="\n").split("\n")
    lines = (line if line.startswith(FIX) else f"mpiddp:   {line}" for line in others)
    return "\n".join([f"mpiddp: {first}", *lines])


def without_prefix(sentence: str) -> str:
    """The sentence without "mpiddp: ", or without the "mpiddp" before the name of a verb."""
    return _PREFIX.sub("", sentence)


def print_line(line: str, stream: TextIO) -> None:
    """Print the line in one write. With PYTHONUNBUFFERED, `print` takes two, and others write between."""
    print(f"{encodable(line, stream)}\n", end="", file=stream, flush=True)


def encodable(text: str, stream: object) -> str:
    """The text as the stream can write it, because it may quote a path of any bytes."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


# --- paths that a user names ---


def cause_of(error: OSError) -> type[UserError] | type[JobFailed]:
    """UserError if the path or the command is wrong, JobFailed if a machine failed."""
    return UserError if error.errno in _WRONG else JobFailed


@contextlib.contextmanager
def named_by(option: str) -> Iterator[None]:
    """Raise an error of a file in the body as `cause_of` says: one sentence that begins with `option`."""
    try:
        yield
    except OSError as error:
        if error.filename is None or error.strerror is None:  # not an error of a file
            raise
        sentence = f"{option} {os.fsdecode(error.filename)}: {error.strerror}."
        raise cause_of(error)(sentence.lstrip()) from None


def of_limit(error: BaseException) -> JobFailed | None:
    """The sentence for an error of this process's limits, as `ulimit` sets them; None for any other error."""
    number = getattr(error, "errno", None)
    if isinstance(error, RuntimeError) and _modules_of(error)[-1:] == ["threading"]:
        number = errno.EAGAIN  # Thread.start has not said so
    if number in _OF_LIMITS:
        sentence = (
            f"this machine gives no more processes or open files to mpiddp: {os.strerror(number)}."
        )
        return JobFailed(
            sentence,
            fix={errno.EAGAIN: MORE_PROCESSES, errno.EMFILE: "raise ulimit -n"}.get(number, ""),
        )
    return None


def check_program(name: str) -> None:
    """Raise UserError unless `name` is a program on PATH, or the path of one."""
    import shutil  # takes 5 ms, and a script does not need it

    if shutil.which(name) is not None:
        return
    if os.sep not in name:
        raise UserError(f'"{escaped(name)}" is not a program on PATH.')
    with named_by(""):
        is_file = stat.S_ISREG(Path(name).stat().st_mode)
    what, fix = ("executable", f"chmod +x {escaped(name)}") if is_file else ("a program", "")
    raise UserError(f"{escaped(name)} is not {what}.", fix=fix)
