"""The command lines that a user can mistype, each with what mpiddp answers: refusals.txt.

Each section has a folder and an environment of its own. A line after "$ " that calls mpiddp runs in a fork of
one process, which is why 400 of them take seconds; any other line prepares files, in a shell.

python -m tests.refusals.test_refusals --update     # then read the diff
"""

import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import pytest

from mpiddp.cli import VERBS
from tests.support.forked import OF_TRAINING, Rank, in_children
from tests.support.patience import PATIENCE_S

FILE = Path(__file__).with_name("refusals.txt")
ROOT = FILE.parents[2]
# Sections whose commands get as far as torch. They stand last: a fork of a process with torch takes longer.
NEED_TORCH = re.compile(r"^\$ .*mpiddp (run\b|train |checkpoints export)", re.MULTILINE)


def environment(folder: Path) -> dict[str, str]:
    """Variables that are the same on every machine: no scheduler, no GPU, this Python's MPI."""
    return {
        "PATH": f"{Path(sys.executable).parent}:{os.defpath}",
        "HOME": str(folder),
        "PYTHONPATH": str(ROOT),
        "LC_ALL": "C.UTF-8",
        "COLUMNS": "80",
        "CUDA_VISIBLE_DEVICES": "",
        "XDG_STATE_HOME": "/dev/null",
        "OMP_NUM_THREADS": "1",
    }


def run(line: str, folder: Path) -> str:
    """All that the line prints, and its exit code unless it is the usual one."""
    words = shlex.split(line)
    count = next((i for i, word in enumerate(words) if "=" not in word), 0)
    env = environment(folder) | dict(word.split("=", 1) for word in words[:count])
    with tempfile.TemporaryFile() as output:
        file = output.fileno()
        if words[count] == "mpiddp":
            usual = 2
            code = in_children(("-m", *words[count:]), [Rank(env)], folder, file, file)
        else:
            usual = 0
            how = {"cwd": folder, "env": env, "stdout": file, "stderr": file}
            code = subprocess.call(["sh", "-c", line], timeout=PATIENCE_S, **how)
        output.seek(0)
        text = generic(output.read().decode(), folder)
    lines = [printed for printed in text.splitlines() if printed.strip()]
    lines += [f"(exit code {code})"] if code != usual else []
    return "".join(f"{printed}\n" for printed in lines)


def generic(text: str, folder: Path) -> str:
    """The text without what differs between machines and versions of Python."""
    text = text.replace(str(folder), "FOLDER")
    text = re.sub(rf"\b(on|from) {re.escape(socket.gethostname())}\b", r"\1 HOST", text)
    text = re.sub(r"(on HOST, which has).*", r"\1 INTERFACES.", text)
    text = re.sub(r"torch \S+ sees none", "torch VERSION sees none", text)
    choices = re.compile(r"fix: choose from .*")  # quoted before Python 3.12
    return choices.sub(lambda found: found[0].replace("'", ""), text)


def answered(section: str, folder: Path) -> str:
    """The section with what its commands print now."""
    if NEED_TORCH.search(section):
        for module in OF_TRAINING:
            import_module(module)  # once for all children
    lines = []
    for line in section.splitlines():
        if line.startswith(("#", "$ ")) or not line:
            lines.append(f"{line}\n")
        if line.startswith("$ "):
            lines.append(run(line.removeprefix("$ "), folder))
    return "".join(lines)


def all_answered() -> str:
    """refusals.txt with what its commands print now."""
    for verb, (name, _) in VERBS.items():
        if verb != "train":  # the others need no torch
            import_module(f"mpiddp.{name.partition(':')[0]}")  # once for all children
    assert "torch" not in sys.modules
    header, *sections = re.split(r"^(?=## )", FILE.read_text(), flags=re.MULTILINE)
    texts = [header]
    for section in sections:
        with tempfile.TemporaryDirectory() as folder:
            texts.append(answered(section, Path(folder).resolve()))
    return "".join(texts)


def by_title(text: str) -> dict[str, str]:
    """Section by title."""
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    return {section.partition("\n")[0]: section for section in sections}


EXPECTED = by_title(FILE.read_text())


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    """The sections now, from a process that has imported little else."""
    done = subprocess.run(
        [sys.executable, "-m", __name__], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return by_title(done.stdout)


@pytest.mark.parametrize("title", EXPECTED)
def test_refusals(title, found):
    """A command line that cannot mean anything is answered in the words of refusals.txt."""
    assert "Traceback" not in EXPECTED[title]
    assert found[title] == EXPECTED[title]


def test_an_error_is_a_short_sentence_and_its_fix_stands_below():
    """A terminal of 160 columns shows each error on one line, and what to do on the next one."""
    said = re.findall("^mpiddp: (.*)", FILE.read_text(), re.MULTILINE)
    assert [sentence for sentence in said if len(sentence) > 160] == []
    orders = (
        r"[.:;] (?i:call|change|copy|give|leave|merge|name|remove|run|set|start|unset|use|write) "
    )
    assert [sentence for sentence in said if re.search(orders, sentence)] == []


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # two threads would wait for each other on the one core
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    text = all_answered()
    if sys.argv[1:] == ["--update"]:
        FILE.write_text(text)
    else:
        sys.stdout.write(text)
