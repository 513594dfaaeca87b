"""The versions of installed packages.

Standard library only: the launcher sends this file to other hosts.
"""

from __future__ import annotations


def package_version(package: str) -> str | None:
    """The version in the package's metadata, None if it is not installed.

    Importing torch to read its version would take seconds.
    """
    from importlib.metadata import PackageNotFoundError, version  # 20 ms

    try:
        return version(package)
    except PackageNotFoundError:
        return None
