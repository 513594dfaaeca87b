"""Training frameworks, tools that show runs, and Jupyter, beside the virtual environment and with its torch.

Also another version of torch, for containers whose torch is not that of the hosts.

python -m tests.support.frameworks install     # into .frameworks/, about 1 GB, without root
python -m tests.support.frameworks             # lists the installed ones
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.cluster.needs import lacking

FOLDER = Path(__file__).resolve().parents[2] / ".frameworks"
PACKAGES = {
    "lightning": "2.6.6",
    "accelerate": "1.15.0",
    "transformers": "5.23.0",
    "ipykernel": "7.4.0",
    "jupyter_client": "8.10.0",
    "tensorboard": "2.21.0",
    "wandb": "0.31.0",
    "mlflow_skinny": "3.17.2",
}
OTHER_TORCH = "2.9.1+cpu"
_PIP = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")


def folder() -> Path:
    """The folder of the installed packages."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return FOLDER / "lib" / version / "site-packages"


def is_installed(package: str) -> bool:
    return (folder() / f"{package}-{PACKAGES[package]}.dist-info").exists()


def environment(package: str) -> dict[str, str]:
    """The variables that let a script import the package; without it, the test is skipped."""
    if not is_installed(package):
        lacking(f"{package} is not installed: python -m tests.support.frameworks install")
    root = str(FOLDER.parent)
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return {**offline, "PYTHONPATH": os.pathsep.join([root, str(folder())])}


def find_other_torch() -> Path | None:
    """The folder of another version of torch: MPIDDP_TEST_TORCH, or that of `install`; None without one."""
    if named := os.environ.get("MPIDDP_TEST_TORCH"):
        return Path(named)
    path = _other_torch()
    return path if (path / f"torch-{OTHER_TORCH}.dist-info").exists() else None


def _other_torch() -> Path:
    return FOLDER / f"torch-{OTHER_TORCH}-{sys.implementation.cache_tag}"


def install() -> None:
    if not all(map(is_installed, PACKAGES)):
        packages = [f"{package}=={version}" for package, version in PACKAGES.items()]
        constraints = ["--constraint", str(FOLDER.parent / "constraints.txt")]
        subprocess.run([*_PIP, *constraints, "--prefix", str(FOLDER), *packages], check=True)
    if find_other_torch() is None:
        _install_other_torch()


def _install_other_torch() -> None:
    """What it needs is in the virtual environment. Not every index has builds for CPUs alone."""
    command = [*_PIP, "--no-deps", "--upgrade", "--target", str(_other_torch())]
    if subprocess.run([*command, f"torch=={OTHER_TORCH}"], stderr=subprocess.DEVNULL).returncode:
        print(
            f"pip finds no torch {OTHER_TORCH}, so its test will skip. PIP_EXTRA_INDEX_URL may name an index "
            "that has it.",
            file=sys.stderr,
        )


if __name__ == "__main__":
    if sys.argv[1:] == ["install"]:
        install()
    for package in PACKAGES:
        print(f"{package:<14} {'installed' if is_installed(package) else 'missing'}")
    print(f"{'another torch':<14} {find_other_torch() or 'missing'}")
