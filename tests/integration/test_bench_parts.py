"""The parts of mpiddp bench that need no ranks: its tables, turns and limits, and the scripts of benchmarks/.

Tests mpiddp/bench/.
"""

import re
import sys

import pytest

from mpiddp.bench.jobs import BenchJobFailed, time_command
from mpiddp.train.config import option_parser as train_parser
from tests.support.place import Here
from tests.support.ranks import ROOT, run_command, script


def test_a_command_has_a_limit():
    with pytest.raises(BenchJobFailed, match=r"it did not end within 0\.2 s\."):
        time_command([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.2)


SIZES = """
import sys
from argparse import Namespace
from mpiddp.bench import loader, step
from mpiddp.train import cifar10
from torch.nn.modules.module import register_module_forward_pre_hook as before_forward
last = {}
def note(module, inputs):
    if type(module).__name__ == "ResNet":
        last[module] = inputs[0].shape[-1]
before_forward(note)
options = Namespace(steps=4, rounds=1)
step.rank(options, sys.argv[1:])
print(*set(last.values()), flush=True)
cifar10.fetch = lambda *_: print("is downloaded", flush=True)
loader.rank(options, [*sys.argv[1:], "--data-dir=."])
"""


def test_every_loop_reads_the_images_that_the_options_ask_for(tmp_path):
    """--low-res-epochs was accepted, and the images were whole ones. CIFAR-10 was not downloaded."""
    training = ("--arch=resnet20", "--batch-size=2", "--low-res-epochs=1", "--backend=gloo")
    done = Here(tmp_path).fork(script(tmp_path, SIZES), *training)
    assert done.lines[-2:] == ["24", "is downloaded"]


SCRIPTS = ("reference", "saving", "scale", "random_faults", "gpu")


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_of_benchmarks_has_help_and_a_row(name):
    done = run_command([sys.executable, "-m", f"benchmarks.{name}", "--help"])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: python -m benchmarks.{name} ")
    table = (ROOT / "benchmarks/README.md").read_text()
    assert f"\n| {name} |" in table
    for command in re.findall(rf"^\| {name} \|.*`{name} ?([^`]*)`", table, re.M):
        known = set(re.findall(r"--[a-z][a-z-]*|-H", done.stdout))
        if "Takes the options of mpiddp train too" in " ".join(done.stdout.split()):
            known |= set(train_parser()._option_string_actions)
        assert set(re.findall(r"--[a-z][a-z-]*|-H", command)) <= known, command


def test_light_clients_speak_the_language_of_the_launcher(tmp_path):
    command = [sys.executable, "-m", "benchmarks.scale", "--ranks", "16", "--out", str(tmp_path)]
    done = run_command(command, ROOT)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^16 +\d", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.slow
def test_saves_are_measured(tmp_path):
    """It failed once BatchNorm's statistics differed between its ranks, as those of a training never do."""
    tiny = ("-H", "localhost:2", "--rounds=1", "--steps=2", "--arch=resnet20", "--batch-size=2")
    command = [sys.executable, "-m", "benchmarks.saving", *tiny, "--out", str(tmp_path)]
    done = run_command(command, ROOT)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\| at once \| \d", done.stdout, re.MULTILINE), done.stdout
