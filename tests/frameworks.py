"""Training frameworks, and Jupyter's kernel, beside the virtual environment, whose torch they use.

python -m tests.frameworks install     # into .frameworks/, about 250 MB, without root
python -m tests.frameworks             # lists the installed ones
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / ".frameworks"
PACKAGES = {
    "lightning": "2.6.6",
    "accelerate": "1.15.0",
    "transformers": "5.23.0",
    "ipykernel": "7.4.0",
    "jupyter_client": "8.10.0",
}


def folder() -> Path:
    """The folder of the installed packages."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return FOLDER / "lib" / version / "site-packages"


def is_installed(package: str) -> bool:
    return (folder() / f"{package}-{PACKAGES[package]}.dist-info").exists()


def environment(package: str) -> dict[str, str]:
    """The variables that let a script import the package; without it, the test is skipped."""
    if not is_installed(package):
        pytest.skip(f"{package} is not installed: python -m tests.frameworks install")
    root = str(FOLDER.parent)
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return {**offline, "PYTHONPATH": os.pathsep.join([root, str(folder())])}


def install() -> None:
    packages = [f"{package}=={version}" for package, version in PACKAGES.items()]
    if all(map(is_installed, PACKAGES)):
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--constraint", str(FOLDER.parent / "constraints.txt")]
    subprocess.run([*command, "--prefix", str(FOLDER), *packages], check=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["install"]:
        install()
    for package in PACKAGES:
        print(f"{package:<12} {'installed' if is_installed(package) else 'missing'}")
