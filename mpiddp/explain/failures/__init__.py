"""The table of known failures: one section of an .ini file each. docs/troubleshooting.md shows it to users.

    [gloo-timeout]                        its id: stable, beginning with a key of PROGRAMS
    says = operation to complete | …      texts that the program prints, each within one line; users read them
    pattern = Timed out waiting \\d+ms     what the line has to match as well, if good runs print the text too;
                                          its group (?P<NAME>…) has the word for NAME in the fix
    weight = symptom                      how near it is to the root cause: see Weight; without it, cause
    blames = another rank                 than the first that failed, so no host; or "host": that of the first
    cause = A rank waited for another …   one or two sentences; what is only likely is called usual
    fix = Look at what the other …        what to do, with the command where there is one

The errors of ssh are rows of mpiddp/hosts/ssh_errors.ini, because the launcher answers them as well. Each row
has a text of the real program in tests/data/failures/. `python -m docs.troubleshooting` writes the page.
"""

from __future__ import annotations

from configparser import RawConfigParser, SectionProxy
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from mpiddp.hosts.complaints import in_general, ssh_errors

# The first word of an id, and how a page names the program. Sorted as the page is.
PROGRAMS = {
    "torch": "torch",
    "gloo": "gloo",
    "nccl": "NCCL",
    "cuda": "CUDA",
    "mpi": "Any MPI",
    "openmpi": "Open MPI",
    "ssh": "ssh",
    "slurm": "Slurm",
    "python": "Python",
    "system": "The system",
}


class Weight(IntEnum):
    """How near a message is to the root cause. The nearest in a log explains it; of equals, the first."""

    ROOT = -1  # it explains each cause that a process names after it
    CAUSE = 0  # it says what is wrong
    SYMPTOM = 1  # something did not work; the cause may stand elsewhere in the log
    EXCEPTION = 2  # a script's own error, which counts only where the job failed as well
    CONSEQUENCE = 3  # another rank or host had failed before


@dataclass(frozen=True)
class Failure:
    """A row of the table. Its id is also the anchor in docs/troubleshooting.md.

    A row without a cause explains nothing: it is an error of the script, or says that a rank has ended.
    """

    id: str
    says: tuple[str, ...]
    cause: str
    fix: str
    pattern: str
    weight: Weight
    blames: str = ""

    @property
    def program(self) -> str:
        return PROGRAMS[self.id.partition("-")[0]]


def _failure(row: SectionProxy, cause: str, fix: str) -> Failure:
    says, pattern = row["says"].split(" |"), "".join(row["pattern"].split("\n"))
    weight = Weight[row.get("weight", "cause").upper()]
    cause, fix = (" ".join(text.split()) for text in (cause, fix))
    return Failure(
        row.name, tuple(map(str.strip, says)), cause, fix, pattern, weight, row.get("blames", "")
    )


_parser = RawConfigParser(
    {"cause": "", "fix": "", "pattern": ""}, delimiters="=", comment_prefixes=";"
)
for _path in sorted(Path(__file__).parent.glob("*.ini")):
    _parser.read_string(_path.read_text(encoding="utf-8"), str(_path))
_OF_FILES = (
    _failure(row, row["cause"], row["fix"]) for row in map(_parser.__getitem__, _parser.sections())
)
_OF_SSH = (_failure(row, *in_general(row)) for row in ssh_errors() if row["says"])
ROWS = (*_OF_FILES, *_OF_SSH)
FAILURES = tuple(row for row in ROWS if row.cause)
