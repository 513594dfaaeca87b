"""The version, which cannot be declared. pyproject.toml has the rest of the metadata.

A release has the version of its tag, in MPIDDP_VERSION (.github/workflows/release.yml). It is refused while
the address of the project in pyproject.toml is a placeholder.
"""

import email
import os
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
PLACEHOLDER = "https://github.com/OWNER/mpiddp"


def version() -> str:
    """The version of a release's sources, else of the release that is made, else the one before the first."""
    info, made = HERE / "PKG-INFO", os.environ.get("MPIDDP_VERSION")
    if info.exists():
        return str(email.message_from_string(info.read_text("utf-8"))["Version"])
    if made and PLACEHOLDER in (HERE / "pyproject.toml").read_text("utf-8"):
        raise SystemExit(f"setup.py: a release needs the project's address, not {PLACEHOLDER}.")
    return made or "0.1.0.dev0"


setup(version=version())
