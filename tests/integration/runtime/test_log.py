"""The log of a rank: its messages on stdout and stderr. A failed write never ends the process."""

import os
import subprocess
import sys

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.ranks import clean_env

LOGS_MESSAGES = """
import sys
from mpiddp.runtime.log import log, log_to_console
log_to_console(rank=int(sys.argv[1]))
log.info("a line")
log.warning("warning: a warning")
log.info("100% done")
"""


@pytest.mark.parametrize(("rank", "printed"), [(0, "a line\n100% done\n"), (1, "")])
def test_only_rank_0_prints_and_every_rank_warns(rank, printed):
    command = [sys.executable, "-c", LOGS_MESSAGES, str(rank)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "warning: a warning\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_line_is_one_write(unbuffered):
    """Else the lines of two ranks that share a pipe are mixed. Of this kind of pipe, a read is one write."""
    reader, writer = os.pipe2(os.O_DIRECT)
    command = [sys.executable, "-c", LOGS_MESSAGES, "0"]
    env = clean_env({"PYTHONUNBUFFERED": unbuffered})
    subprocess.run(command, env=env, stdout=writer, stderr=writer, check=True, timeout=PATIENCE_S)
    os.close(writer)
    writes = list(iter(lambda: os.read(reader, 65536), b""))
    os.close(reader)
    assert writes == [b"a line\n", b"warning: a warning\n", b"100% done\n"]
