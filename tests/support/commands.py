"""The programs and options that tests run: what none of them runs has a † on the pages.

tests/data/commands.tsv names a test for each program and option of the pages, and tests/docs compares them.
A test that is named there fails if it passes without them. `--record-commands` adds what the list lacks:

    ./run.sh test all --record-commands -k test_of_the_new_option
"""

import fcntl
import os
import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

LIST = Path(__file__).parents[1] / "data" / "commands.tsv"
PROGRAMS = {
    *("mpiddp", "run.sh", "mpirun", "srun", "sbatch", "scancel", "qsub", "torchrun", "deepspeed"),
    *("horovodrun", "accelerate", "python", "pip", "conda", "uv", "docker", "podman", "apptainer"),
    *("enroot", "nsys", "py-spy", "tensorboard"),
}
_run: set[str] = set()


def listed() -> dict[str, str]:
    """The test of each program and option."""
    lines = LIST.read_text(encoding="utf-8").splitlines()
    return dict(line.split("\t") for line in lines)


@cache
def _of_test(test: str) -> frozenset[str]:
    return frozenset(word for word, other in listed().items() if other == test)


def words(parts: Iterable[str]) -> set[str]:
    """The programs of a command, and their options. The options of other programs are none of ours."""
    found = set()
    program = ""
    for part in parts:
        name = "torchrun" if part == "torch.distributed.run" else Path(part).name
        if name in PROGRAMS:
            found.add(program := name)
        elif program and re.match("--[a-z]", part):
            found.add(part.partition("=")[0].replace("_", "-"))
    return found


def watch() -> None:
    """Note from now on what this process starts. A process has one hook of this kind for its life."""

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "subprocess.Popen":
            command = arguments[1]
            note([command] if isinstance(command, str | bytes) else command)

    sys.addaudithook(hook)


def note(arguments: Iterable[str | bytes | os.PathLike[str]]) -> None:
    """Note that the test that runs now has run this command."""
    # A script within it is commands as well.
    _run.update(words(part for each in arguments for part in os.fsdecode(each).split()))


def begin() -> None:
    """A test begins."""
    _run.clear()


def not_run(test: str) -> list[str]:
    """What the list says that this test has run, and it has not."""
    return sorted(_of_test(test) - _run)


def record(test: str, wanted: Iterable[str]) -> None:
    """Add to the list what this test has run of `wanted` and no other test has."""
    with LIST.open("r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # of the other processes that run tests
        rows = dict.fromkeys(_run.intersection(wanted), test) | listed()
        file.truncate()
        file.write("".join(f"{word}\t{rows[word]}\n" for word in sorted(rows)))
