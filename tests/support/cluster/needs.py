"""The requirements of a test cluster, and which of them this machine lacks.

To install its Debian packages: `apt-get install $(python -m tests.support.cluster packages)`.
"""

import os
import shutil
import subprocess
from functools import cache
from typing import NoReturn

from tests.support.patience import PATIENCE_S

PACKAGES = (
    "openssh-server",  # sshd, one for each host
    "openssh-client",  # ssh, ssh-keygen
    "iproute2",  # ip: veth pairs, bridge, addresses
    "rsync",  # a push of large files
    "nftables",  # nft, a firewall
    *("podman", "runc"),  # containers
    "locales",  # the character sets of other locales
    *("fish", "tcsh"),  # login shells of other kinds
    # unshare, nsenter, setpriv, setsid and script are util-linux, which every Debian has.
)
SLURM_PACKAGES = (
    "slurm-wlm",  # slurmctld, slurmd, srun, sbatch, salloc
    "munge",  # authentication between Slurm's daemons
)

GRID_ENGINE_PACKAGES = (
    "gridengine-master",  # sge_qmaster
    "gridengine-exec",  # sge_execd
    "gridengine-client",  # qsub, qrsh, qconf
)

# Daemons are in sbin, which is not on every user's PATH.
PATH = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"

# The namespaces that make a process a host, as arguments of unshare.
NAMESPACES = (
    *("--net", "--uts", "--ipc", "--mount", "--mount-proc"),
    *("--pid", "--fork", "--kill-child"),
)

_TOOLS = ("ip", "ssh", "ssh-keygen", "sshd", "unshare", "nsenter", "setpriv", "setsid", "mount")
_SLURM_TOOLS = ("slurmctld", "slurmd", "srun", "sbatch", "munged")
_GRID_ENGINE_TOOLS = ("sge_qmaster", "sge_execd", "qsub", "qrsh", "qconf")


def tool(name: str) -> str:
    """The absolute path of a program of this machine. Raises FileNotFoundError if it is missing."""
    path = shutil.which(name, path=PATH)
    if path is None:
        raise FileNotFoundError(f"{name} is not installed")
    return path


def lacking(reason: str) -> NoReturn:
    """Skip the test, since this machine lacks a part. With MPIDDP_TEST_NEEDS=all, the test fails."""
    import pytest  # here, because the command line of the cluster must work without pytest

    if os.environ.get("MPIDDP_TEST_NEEDS") == "all":
        pytest.fail(f"{reason} (MPIDDP_TEST_NEEDS=all allows no skip)", pytrace=False)
    pytest.skip(reason)


def need(*tools: str) -> None:
    """Skip the test if this machine lacks one of these programs."""
    if missing := [name for name in tools if shutil.which(name, path=PATH) is None]:
        package = "iproute2" if missing[0] == "ss" else missing[0]  # the shells have their names
        lacking(f"this machine has no {missing[0]}. Run: apt-get install {package}")


@cache
def why_not() -> str | None:
    """The reason why this machine cannot run a cluster, in one sentence, or None."""
    if os.geteuid() != 0:
        return "the test cluster needs root (it creates network, mount and pid namespaces)"
    if reason := _why_lacking("test", _TOOLS, PACKAGES):
        return reason
    probe = subprocess.run(
        ["unshare", *NAMESPACES, "ip", "-batch", "-"],
        input="link add switch type bridge\nlink add veth0 type veth peer name veth1\n",
        text=True,
        capture_output=True,
        env={**os.environ, "PATH": PATH},
        timeout=PATIENCE_S,
    )
    if probe.returncode != 0:
        return f"the test cluster cannot create namespaces here: {probe.stderr.strip()}"
    return None


@cache
def why_no_slurm() -> str | None:
    """The reason why this machine cannot run a Slurm cluster, in one sentence, or None."""
    return why_not() or _why_lacking("Slurm", _SLURM_TOOLS, SLURM_PACKAGES)


@cache
def why_no_grid_engine() -> str | None:
    """The reason why this machine cannot run a Grid Engine cluster, in one sentence, or None."""
    return why_not() or _why_lacking("Grid Engine", _GRID_ENGINE_TOOLS, GRID_ENGINE_PACKAGES)


def _why_lacking(kind: str, tools: tuple[str, ...], packages: tuple[str, ...]) -> str | None:
    missing = ", ".join(name for name in tools if shutil.which(name, path=PATH) is None)
    lacking = f"the {kind} cluster lacks {missing}. Run: apt-get install {' '.join(packages)}"
    return lacking if missing else None
