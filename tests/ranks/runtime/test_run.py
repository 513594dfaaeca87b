"""A script runs under `mpiddp run` as under `python`: the same environment, end and output.

Tests mpiddp/runtime/start/run.py.
python -m pytest tests/ranks/runtime/test_run.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socket import gethostname

import pytest

from tests.support.errors import error
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT, clean_env, mpirun, own_lines

RUN = ("-m", "mpiddp", "run")
JOBS = ROOT / "tests" / "jobs"
Done = subprocess.CompletedProcess[str]


def python(*args: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> Done:
    command = [sys.executable, *args]
    return subprocess.run(
        command, cwd=cwd, env=clean_env(env), capture_output=True, text=True, timeout=PATIENCE_S
    )


def own_stderr(done: Done) -> list[str]:
    """The script's own lines on stderr: all except the line that names the rank that failed."""
    own = r"rank \d+ on \S+ (failed: |ended with exit code )"
    return [line for line in done.stderr.splitlines() if not re.match(own, line)]


# --- the environment of a script ---

PRINT_FACTS = '''
"""A script that prints its environment."""
import __main__, dataclasses, json, multiprocessing, os, pickle, sys
import neighbour

@dataclasses.dataclass
class Thing:
    number: int = 0

def facts():
    return {
        "argv": sys.argv,
        "name": __name__,
        "file": __file__,
        "doc": __doc__,
        "path": sys.path[0],
        "builtins": type(__builtins__).__name__,
        "cwd": os.getcwd(),
        "globals": sorted(set(globals()) - {"__annotations__", "__loader__"}),
        "main is me": __main__.Thing is Thing,
        "package and spec": [__package__, __spec__],
        "neighbour": neighbour.__file__,
        "data": open("data.txt").read(),
        "annotations": str(Thing.__init__.__annotations__),
        "pickled": pickle.loads(pickle.dumps(Thing(7))).number,
    }

def double(thing):
    return Thing(2 * thing.number)

if __name__ == "__main__":
    found = facts()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found["spawned"] = pool.map(double, [Thing(21)])[0].number
    print(json.dumps(found))
    sys.exit(3)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with data, a subfolder of scripts, and a link to a script."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "facts.py").write_text(PRINT_FACTS)
    (scripts / "neighbour.py").write_text("")
    (tmp_path / "data.txt").write_text("42")
    (tmp_path / "link.py").symlink_to(scripts / "facts.py")
    return tmp_path


@pytest.mark.parametrize("script", ["scripts/facts.py", "link.py"])
def test_a_script_has_the_same_environment_as_under_python(folder: Path, script: str) -> None:
    args = [script, "--", "--flag", "-m", "--", "--keep-mpi", "a b"]
    plain = python(*args, cwd=folder)
    done = python(*RUN, *args, cwd=folder)
    assert (plain.returncode, plain.stderr) == (3, "")
    assert (done.stdout, done.returncode, own_stderr(done)) == (plain.stdout, 3, [])


def test_a_script_has_the_path_that_python_gives_it_in_safe_mode(folder: Path) -> None:
    first = folder / "first"
    first.mkdir()
    (first / "elsewhere.py").write_text("")
    (folder / "own.py").write_text("import elsewhere, sys; print(sys.path[0])")
    env = {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join([str(first), str(ROOT)])}
    plain = python("own.py", cwd=folder, env=env)
    done = python(*RUN, "own.py", cwd=folder, env=env)
    assert plain.returncode == 0, plain.stderr
    assert (done.stdout, done.returncode, own_stderr(done)) == (plain.stdout, 0, [])


@pytest.mark.parametrize("module", ["package", "package.facts"])
def test_a_module_has_the_same_environment_as_under_python(folder: Path, module: str) -> None:
    package = folder / "package"
    package.mkdir()
    code = PRINT_FACTS.replace("import neighbour", "from . import neighbour")
    code = code.replace("__spec__]", "__spec__.name]")
    if module == "package":  # python does not let a spawned process import a package's __main__
        code = code.replace('"spawn"', '"fork"')
    for name, text in {
        "__main__": code,
        "facts": code,
        "__init__": "",
        "neighbour": "",
    }.items():
        (package / f"{name}.py").write_text(text)
    args = ["-m", module, "--flag", "-m", "x"]
    plain = python(*args, cwd=folder)
    done = python(*RUN, *args, cwd=folder)
    assert (plain.returncode, plain.stderr) == (3, "")
    assert (done.stdout, done.returncode, own_stderr(done)) == (plain.stdout, 3, [])


# --- the end of a script ---

ENDS = {
    "exit-none": "import sys\nsys.exit()",
    "exit-text": "import sys\nsys.exit('a last message')",
    "error": "def f():\n    raise RuntimeError('a bug')\n\nf()",
    "library": "import json\njson.loads('{')",
    "cause": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise OSError('a bug') from e",
    "syntax": "x = = 1",
    "interrupt": "raise KeyboardInterrupt",
    "hook": "import sys\nsys.excepthook = lambda *a: print('my hook', a[0].__name__)\n1 / 0",
    "module-error": "def f():\n    raise RuntimeError('a bug')\n\nf()",
    "module-syntax": "x = = 1",
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Done, Done]]:
    """The end of each script under plain python and under `mpiddp run`, once: torch's import is slow."""
    folder = tmp_path_factory.mktemp("ends")

    def both(name: str) -> tuple[Done, Done]:
        file = folder / f"{name.replace('-', '_')}.py"
        file.write_text(f"{ENDS[name]}\n")
        args = ["-m", file.stem] if name.startswith("module") else [file.name]
        return python(*args, cwd=folder), python(*RUN, *args, cwd=folder)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(ENDS, pool.map(both, ENDS), strict=True))


@pytest.mark.parametrize("name", ENDS)
def test_a_script_ends_as_under_python(ends: dict[str, tuple[Done, Done]], name: str) -> None:
    """The exit code and the output are the same, and the traceback has only the script's frames."""
    plain, done = ends[name]
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout)
    runpy_frames = r'  File "<frozen .*\n(    .*\n)*'
    expected = re.sub(runpy_frames, "", plain.stderr).splitlines()
    if name == "module-syntax":  # without these frames there is no traceback
        assert expected.pop(0) == "Traceback (most recent call last):"
    assert own_stderr(done) == expected


def test_the_scripts_above_end_differently(ends: dict[str, tuple[Done, Done]]) -> None:
    codes = {name: done.returncode for name, (_, done) in ends.items()}
    assert codes["exit-none"] == 0
    assert codes["exit-text"] == codes["error"] == codes["syntax"] == 1
    assert "a last message" in ends["exit-text"][1].stderr
    assert "mpiddp" not in ends["error"][1].stderr
    assert ends["hook"][1].stdout == "my hook ZeroDivisionError\n"


def test_mpirun_exits_with_the_code_of_the_failed_rank() -> None:
    done = mpirun(2, *RUN, str(JOBS / "exit_3.py"))
    assert done.returncode == 3
    assert own_lines(done.stderr) == [f"rank 1 on {gethostname()} ended with exit code 3"]


# --- scripts that cannot be run ---


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["nosuch.py"], error("not found", "nosuch.py ", f" {ROOT})")),
        (["--bad", "x"], error("--help", "mpiddp run: ", "--bad. ", "mpiddp run --help")),
    ],
)
def test_all_ranks_print_a_refusal_once(args: list[str], sentence: str) -> None:
    done = mpirun(3, *RUN, *args)
    (line,) = own_lines(done.stderr)
    assert re.fullmatch(sentence, line), line
    assert done.returncode == 2


@pytest.mark.parametrize("verb", ["run", "train"])
def test_all_ranks_print_the_help_once(verb: str) -> None:
    done = mpirun(3, "-m", "mpiddp", verb, "--help")
    assert done.stdout.count(f"usage: mpiddp {verb} ") == 1
    assert (done.returncode, done.stderr) == (0, "")


def test_all_ranks_of_a_real_mpirun_print_incomplete_variables_once() -> None:
    for _ in range(3):
        done = mpirun(4, *RUN, "any.py", env={"TORCHELASTIC_RUN_ID": "stale"})
        (sentence,) = own_lines(done.stderr)
        missing = error("only some", "torchrun's ", "TORCHELASTIC_RUN_ID")
        assert re.fullmatch(missing, sentence), sentence
        assert done.returncode == 2


# --- the same script under every launcher ---


@pytest.mark.slow
def test_one_script_prints_the_same_under_every_launcher() -> None:
    script = str(JOBS / "ddp_script.py")
    torchrun = ["--nproc-per-node", "2", "--standalone"]
    commands = {
        "mpirun": mpirun(2, *RUN, script),
        "torchrun": python("-m", "torch.distributed.run", *torchrun, script),
        "torchrun of run": python("-m", "torch.distributed.run", *torchrun, *RUN, script),
    }
    lines = {name: sorted(done.stdout.splitlines()) for name, done in commands.items()}
    assert [done.returncode for done in commands.values()] == [0] * len(commands), commands
    assert len(lines["mpirun"]) == 2
    assert lines["mpirun"][1].startswith("rank 1 of 2 local 1: ")
    for name, printed in lines.items():
        assert (name, printed) == (name, lines["mpirun"])


def test_without_a_launcher_a_script_is_a_job_of_one_rank() -> None:
    done = python(*RUN, str(JOBS / "ddp_script.py"))
    assert done.stdout.startswith("rank 0 of 1 local 0: "), done.stderr
    assert done.returncode == 0
