"""What a rank runs: a script, a module, or a command."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from mpiddp.arguments import OneSentenceParser
from mpiddp.errors import UserError
from mpiddp.paths import check_program, named_by
from mpiddp.protocol.variables import AGENT_STORE, GPUS, PLACEMENT, RUN_ID
from mpiddp.world import RANK_SOURCES

SCRIPT, MODULE, COMMAND = "script", "module", "command"
_IMPORT = re.compile(rb"^[ \t]*(?:from|import)[ \t]+([\w.]+(?:[ \t]*,[ \t]*[\w.]+)*)", re.MULTILINE)
# Not multiprocessing: `mpiddp.runtime.script` prepares the processes of a script that may use torch.
_WITHOUT_TORCH = {*sys.stdlib_module_names, "mpiddp"} - {"multiprocessing", "concurrent"}
# The variables that an MPI sets for its ranks. A command that starts MPI would join this job with them.
_OF_MPI = (
    *("OMPI_", "OPAL_", "ORTE_", "PRTE_", "PMIX_", "PMI_", "HYDI_", "HYDRA_"),
    *("MPI_LOCAL", "MPIR_CVAR_", "MV2_COMM_WORLD_", "I_MPI_", "JSM_", "PALS_", "FLUX_TASK_"),
    *(name for source in RANK_SOURCES if source.speaks_mpi for name in source.variables),
)


class Program(NamedTuple):
    """The program of a rank: its kind, its name, and its arguments."""

    kind: str
    name: str
    args: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise UserError, or JobFailed for a broken disk, if it is not there.

        Of a module, look for the first part of its name alone: the agent imports nothing of the user's.
        """
        name, path, before = self.name, Path(self.name), sys.path[0]
        if self.kind == MODULE:
            sys.path[0] = os.getcwd()  # noqa: PTH109 - the same string as python -m uses
            first = name.partition(".")[0]
            try:
                if not first or find_spec(first) is None:
                    where = f"{Path.cwd()} and in the installed packages"
                    raise UserError(f"module {name} not found (looked in {where}).")
            finally:
                sys.path[0] = before
        elif self.kind == SCRIPT:
            with named_by(""):
                if not path.exists():
                    raise UserError(f"{name} not found (looked in {Path.cwd()}).")
                if path.is_dir():
                    raise UserError(
                        f"{name} is a folder, not a script. To run a module: mpiddp run -m MODULE"
                    )
                if not path.is_file():
                    raise UserError(
                        f"{name} is no regular file, and each rank reads its script from the disk."
                    )
                path.open("rb").close()
        elif self.kind == COMMAND:
            check_program(name, os.environ.get("PATH"))

    @property
    def may_use_torch(self) -> bool:
        """False of a command, and of a script that imports nothing but Python's own modules and mpiddp.

        Such a script begins at once. If it does use torch after all, it only does without the head start.
        """
        if self.kind != SCRIPT:
            return self.kind == MODULE
        try:
            text = Path(self.name).read_bytes()
        except OSError:  # python will say why
            return True
        return b"torch" in text or bool(_imported_by(text) - _WITHOUT_TORCH)

    @property
    def files(self) -> list[tuple[str, str]]:
        """The script and the modules beside it that it imports, each with its SHA-256."""
        if self.kind != SCRIPT:
            return []
        found: dict[str, str] = {}
        folder, todo = Path(self.name).parent, [Path(self.name)]
        while todo:
            path = todo.pop()
            name = str(path.relative_to(folder))
            if name not in found:
                with suppress(OSError):  # python will say why, if the script ever imports it
                    text = path.read_bytes()
                    found[name] = sha256(text).hexdigest()
                    for first in _imported_by(text):
                        if (module := folder / f"{first}.py").is_file():
                            todo.append(module)
                        elif (folder / first).is_dir():  # a package counts as a whole
                            todo += (folder / first).rglob("*.py")
        return sorted(found.items())


def _imported_by(text: bytes) -> set[str]:
    """The first parts of the names of the modules that a script imports, as far as its lines show it."""
    names = b",".join(_IMPORT.findall(text)).decode().split(",")
    return {name.strip().partition(".")[0] for name in names} - {""}


def parse(argv: list[str]) -> Program:
    """The program in the arguments of `mpiddp run`."""
    ours = list(takewhile(lambda each: each.startswith("-") and each not in ("--", "-m"), argv))
    rest = argv[len(ours) :]
    is_command, is_module = rest[:1] == ["--"], rest[:1] == ["-m"]
    job = rest[1:] if is_command or is_module else rest
    parser = OneSentenceParser(
        prog="mpiddp run",
        usage="%(prog)s (SCRIPT | -m MODULE | -- COMMAND) [ARGS ...]",
        description="Run an unmodified env:// script, or any command, as one rank of a job, after all "
        "ranks have joined.",
        allow_abbrev=False,
    )
    parser.add_argument("script", metavar="SCRIPT", help="a Python file, or a module with -m")
    parser.parse_args([*ours, *(["command"] if is_command else job[:1])])
    if is_command and not job:
        raise UserError('mpiddp run: no command follows "--". See: mpiddp run --help')
    kind = COMMAND if is_command else MODULE if is_module else SCRIPT
    return Program(kind, job[0], tuple(job[1:]))


def command_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The variables of the command of a rank that has joined, from those of the rank."""
    # The command may start a torchrun with other ranks. The agent has applied GPUS.
    left_out = (*_OF_MPI, GPUS, PLACEMENT, AGENT_STORE)
    found = {name: value for name, value in env.items() if not name.startswith(left_out)}
    found.setdefault(RUN_ID, found["TORCHELASTIC_RUN_ID"])  # under torchrun
    return found
