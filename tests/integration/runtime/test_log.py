"""The log of a rank: its messages on stdout, stderr and in a file. A failed write never ends the process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpiddp.runtime.log import log, log_to_file
from tests.support.patience import PATIENCE_S
from tests.support.ranks import clean_env

LOGS_MESSAGES = """
import sys
from pathlib import Path
from mpiddp.runtime.log import log, log_to_console, log_to_file
log_to_console(rank=int(sys.argv[1]))
with log_to_file(log, Path(sys.argv[2])):
    log.info("a line")
    log.warning("warning: a warning")
    log.info("100% done")
"""


def log_messages(
    rank: int, file: str | Path, stdout: int = subprocess.PIPE
) -> tuple[int, str, str]:
    command = [sys.executable, "-c", LOGS_MESSAGES, str(rank), str(file)]
    with subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True) as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


@pytest.mark.parametrize(("rank", "printed"), [(0, "a line\n100% done\n"), (1, "")])
def test_only_rank_0_prints_and_every_rank_warns(rank: int, printed: str, tmp_path: Path) -> None:
    assert log_messages(rank, tmp_path / "log") == (0, printed, "warning: a warning\n")


def test_the_file_has_every_message_with_its_time(tmp_path: Path) -> None:
    log_messages(1, tmp_path / "log")
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line.split(maxsplit=2)[2] for line in lines] == [
        "a line", "warning: a warning", "100% done",
    ]  # fmt: skip


def test_logging_continues_on_a_full_disk() -> None:
    assert log_messages(0, "/dev/full") == (0, "a line\n100% done\n", "warning: a warning\n")


def test_logging_continues_after_stdout_is_closed(tmp_path: Path) -> None:
    command = f"{sys.executable} -c '{LOGS_MESSAGES}' 0 {tmp_path}/log; echo $? >{tmp_path}/code"
    with subprocess.Popen(command, shell=True, stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None
        shell.stdout.close()
    assert (tmp_path / "code").read_text() == "0\n"
    assert len((tmp_path / "log").read_text().splitlines()) == 3


@pytest.mark.parametrize("encoding", ["utf-8:strict", "ascii:strict"])
def test_a_message_may_contain_any_character(encoding: str, tmp_path: Path) -> None:
    """A path may be any bytes; Python then has surrogates for those that are not UTF-8."""
    code = LOGS_MESSAGES.replace("a line", "a \\udcff… line")
    command = [sys.executable, "-c", code, "0", str(tmp_path / "log")]
    env = clean_env({"PYTHONIOENCODING": encoding})
    done = subprocess.run(command, env=env, capture_output=True, check=True, timeout=PATIENCE_S)
    assert done.stdout.startswith(b"a \\udcff")
    assert "a \\udcff… line" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_line_is_one_write(unbuffered: str, tmp_path: Path) -> None:
    """Else the lines of two ranks that share a pipe are mixed. Of this kind of pipe, a read is one write."""
    reader, writer = os.pipe2(os.O_DIRECT)
    command = [sys.executable, "-c", LOGS_MESSAGES, "0", str(tmp_path / "log")]
    env = clean_env({"PYTHONUNBUFFERED": unbuffered})
    subprocess.run(command, env=env, stdout=writer, stderr=writer, check=True, timeout=PATIENCE_S)
    os.close(writer)
    writes = list(iter(lambda: os.read(reader, 65536), b""))
    os.close(reader)
    assert writes == [b"a line\n", b"warning: a warning\n", b"100% done\n"]


def test_a_file_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"), log_to_file(log, tmp_path / "none" / "log"):
        pass
