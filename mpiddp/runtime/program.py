"""What a rank runs: a script, a module or a command."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Mapping
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import IO, NamedTuple

from mpiddp.errors import UserError, check_program, named_by
from mpiddp.hosts.program_files import files_of, import_folders
from mpiddp.protocol import variables
from mpiddp.protocol.variables import AGENT_STORE, GPUS, PLACEMENT, RUN_ID
from mpiddp.world import RANK_SOURCES, set_by_launchers

SCRIPT, MODULE, COMMAND = "script", "module", "command"
_SHELL = re.compile(rb"#!.*\b(?:sh|bash|dash|zsh|ksh|fish|csh|tcsh)\s*$")
_LIBRARIES, _PREFIXES = "LD_LIBRARY_PATH", ("OPAL_PREFIX", "PMIX_PREFIX", "PRTE_PREFIX")
# The identity of a rank of any MPI, which may be left over from another one.
_IDENTITY = tuple(name for source in RANK_SOURCES if source.mpis for name in source.variables)


class Program(NamedTuple):
    kind: str
    name: str
    args: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise UserError if the program is missing, or JobFailed for a broken disk."""
        name, path = self.name, Path(self.name)
        if self.kind == COMMAND:
            check_program(name)
        elif self.kind == MODULE:
            first = name.partition(".")[0]
            folders = [str(Path.cwd()), *sys.path]  # where python -m looks
            if not first or not (PathFinder.find_spec(first, folders) or find_spec(first)):
                where = f"{Path.cwd()} and in the installed packages"
                dotted = name.removesuffix(".py").strip("/").replace("/", ".")
                hint = f" Did you mean -m {dotted}?" if dotted != name else ""
                raise UserError(f"module {name} not found (looked in {where}).{hint}")
        else:
            with named_by(""):
                if not path.exists():
                    raise UserError(f"script {name} not found (looked in {Path.cwd()}).")
                if path.is_dir() and (path / "__main__.py").is_file():
                    return
                if not path.is_file():
                    if path.is_dir():
                        what, fix = "a folder without a __main__.py", "mpiddp run -m MODULE"
                        raise UserError(f"{name} is {what}.", fix=fix)
                    raise UserError(f"{name} is no regular file.")
                with path.open("rb") as file:
                    _refuse_shell_script(name, file.readline(1000), file)

    @property
    def title(self) -> str:
        """Its script or module, which all ranks share; "" for a command, of which mpirun may start several."""
        if self.kind == MODULE:
            return f"-m {self.name}"
        return os.path.normpath(self.name) if self.kind == SCRIPT else ""

    def files(self) -> list[tuple[str, str]]:
        """Its files that have to be the same on all hosts, each with its SHA-256."""
        return files_of(self.kind, self.name, str(Path.cwd()), import_folders())


def _refuse_shell_script(name: str, first_line: bytes, rest: IO[bytes]) -> None:
    """Refuse a shell script. Some files begin like one, and are Python too."""
    if not _SHELL.match(first_line):
        return
    try:
        compile(first_line + rest.read(), name, "exec")
    except (SyntaxError, ValueError):
        line = first_line.decode(errors="replace").strip()
        fix = f"mpiddp launch … -- {name if os.sep in name else f'./{name}'}"
        raise UserError(f'{name} is not Python: it begins with "{line}".', fix=fix) from None


def parse(argv: list[str]) -> Program:
    kind = {"--": COMMAND, "-m": MODULE}.get("".join(argv[:1]), SCRIPT)
    job = argv if kind == SCRIPT else argv[1:]
    if not job or (kind == SCRIPT and job[0].startswith("-")):  # for example --help
        what = f"expected a script, a module or a command{f', not {job[0]}' if job else ''}"
        raise UserError(
            f"mpiddp run: {what}.", fix="mpiddp run (SCRIPT | -m MODULE | -- COMMAND) [ARGS ...]"
        )
    return Program(kind, job[0], tuple(job[1:]))


def script_environment(
    env: Mapping[str, str], launcher: str, exported: Collection[str] = ()
) -> dict[str, str]:
    """The variables of the program of a rank that has joined, from those of the rank.

    A process that finds the MPI's would join the job as this rank: one that the script starts, or a worker
    that imports a library. `launcher` is the name of the rank's: another one's ids are not this rank's. The
    variables that the user has named with -x, `exported`, stay in any case.
    """
    left_out = (*_of_mpi(env), *(() if launcher == "slurm" else ("SLURM_STEP_ID",)))
    rest = {
        name: value
        for name, value in env.items()
        if name in exported or not name.startswith(left_out)
    }
    folders = rest.pop(_LIBRARIES, "").split(os.pathsep)
    # Open MPI puts its own before those of the user.
    of_mpi = {
        env.get("OMPI_LIBDIR_LOC"),
        *(f"{env[name]}/lib" for name in _PREFIXES if name in env),
    }
    while folders[0] and folders[0] in of_mpi:
        folders = folders[1:] or [""]
    return rest | ({_LIBRARIES: os.pathsep.join(folders)} if any(folders) else {})


def mpi_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The variables with which a process joins the rank's mpirun as this rank."""
    return {name: value for name, value in env.items() if name.startswith(_of_mpi(env))}


def _of_mpi(env: Mapping[str, str]) -> tuple[str, ...]:
    """The beginnings of the names that the MPI of a rank sets, and the names of a rank of any MPI."""
    return (*set_by_launchers(env), *_IDENTITY)


def command_environment(
    env: Mapping[str, str], launcher: str = "", exported: Collection[str] = ()
) -> dict[str, str]:
    """The variables of the command of a rank that has joined: it may start a torchrun with other ranks."""
    rest = script_environment(env, launcher, exported)
    for name in {GPUS, PLACEMENT, AGENT_STORE}.difference(exported):
        rest.pop(name, None)
    rest.setdefault(RUN_ID, rest["TORCHELASTIC_RUN_ID"])  # under torchrun
    rest[variables.COMMAND] = "1"
    return rest
