"""More figures of the pages, and of `mpiddp launch --help`, that are constants of the program.

`TIMES` in test_pages.py has the others.
"""

import re
from pathlib import Path

import pytest
import torch

from mpiddp.checkpoints import agreement, save
from mpiddp.hosts import private, push, pushed
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.ssh import config_file
from mpiddp.launch.plan.options import LaunchOptions, option_parser
from mpiddp.launch.run import control
from mpiddp.protocol import variables
from mpiddp.runtime import rank_attempt
from tests.support.ranks import ROOT

HEADER = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
NCCL_MIN = re.search(
    r"NCCLDefaultTimeout =\s+std::chrono::milliseconds\((\d+) \* 60 \* 1000\)", HEADER.read_text()
)
SIGNAL_S = re.search(r"--signal=B:TERM@(\d+)", (ROOT / "examples/slurm/train.sbatch").read_text())
FIGURES = [
    ("architecture", "and SIGKILL {:.0f} s later", rank_attempt._END_S),
    ("architecture", "at most {:.0f} minutes", variables.SAVE_GRACE_S / 60),
    ("python-names", "it has up to {:.0f} minutes", variables.SAVE_GRACE_S / 60),
    ("checkpoints", "tensors of up to {:,} integers", agreement._SMALL),
    ("checkpoints", "and every {}, compare", {10: "tenth"}[save.COMPARED_SAVES]),
    ("restarts", "A host is lost after {:.0f} s of silence", LaunchOptions.lost_s),
    ("stop", "a second Ctrl-C ({:.1f} s later or more)", control._REPEAT_OF_CTRL_C_S),
    ("stop", "another signal twice ({:.0f} s)", control._REPEAT_S),
    ("slurm", "{:.0f} minutes before the limit", int(SIGNAL_S[1]) / 60),
    ("hangs", "and {:.0f} min for NCCL", int(NCCL_MIN[1])),
    ("launch", "| `{}`, ", pushed.SENT),
    ("launch", "`{}/` in a pushed folder", push._REPLACED),
    ("launch", "| `{}/mpiddp-*` |", private._PARENT),
]


@pytest.mark.parametrize(("page", "sentence", "figure"), FIGURES)
def test_a_figure_on_a_page_is_that_of_the_program(page, sentence, figure):
    text = " ".join((ROOT / f"docs/{page}.md").read_text().split())
    assert sentence.format(figure) in text


# The release of OpenSSH that brought each setting of ours, by https://www.openssh.com/releasenotes.html, which
# begin with 2.9. Also: ssh -G came with 6.8, and ssh -J with 7.3.
SETTINGS = {
    **dict.fromkeys(
        ["Host", "HostName", "User", "Port", "LogLevel", "BatchMode", "ClearAllForwardings"], 2.9
    ),
    "ConnectTimeout": 3.7,
    "ServerAliveInterval": 3.8,
    "ServerAliveCountMax": 3.8,
    "ControlMaster": 3.9,
    "ControlPath": 3.9,
    "ControlPersist": 5.6,
    "RequestTTY": 5.9,
    "Include": 7.3,
    "RemoteCommand": 7.6,
}


def test_the_oldest_openssh_is_that_of_the_newest_setting():
    hosts = [Host("fd00::7", user="joe", port=22)]
    with config_file(hosts) as path:
        text = Path(path).read_text(encoding="utf-8")
    written = {line.split()[0] for line in text.splitlines()}
    assert (
        written | {"ControlPath", "ControlPersist"} == SETTINGS.keys()
    )  # these two share jump hosts
    assert f"OpenSSH ({max(SETTINGS.values())} or newer)" in (ROOT / "docs/clusters.md").read_text()


def test_a_time_in_the_help_of_launch_is_the_default():
    said = {}
    for action in option_parser()._actions:
        if seconds := re.search(r"\(default: (\d+) s\)$", action.help or ""):
            said[action.dest] = float(seconds[1])
    assert said.keys() == {"login_s", "lost_s", "timeout_s", "grace_s", "failed_grace_s"}
    actual = {name: getattr(LaunchOptions, name) for name in said}
    assert said == {**actual, "timeout_s": variables.JOIN_TIMEOUT_S}
