"""What a host keeps for the ranks: for its user alone, and no other user's folder is opened."""

import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

import pytest

from mpiddp.hosts import private
from mpiddp.hosts.private import keep, new_name, own_folder, packed, remove, take

VARIABLES = {"MY_KEY": "é = 1\n", "FUNC%%": "\udcff", "EMPTY": ""}
KEPT = packed(VARIABLES)


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(private, "_PARENT", tmp_path)
    return tmp_path


def test_hosts_that_share_a_folder_keep_the_same(parent):
    name = new_name()
    for _ in range(2):
        keep(name, KEPT)
    (file,) = private._folder(name).iterdir()
    assert (take(name), file.stat().st_mode & 0o777) == (VARIABLES, 0o600)
    remove(name)
    remove(name)
    assert not list(parent.iterdir())


@pytest.mark.parametrize("how", ["open", "link"])
def test_a_folder_of_others_is_neither_opened_nor_followed(parent, how):
    name, theirs = new_name(), parent / "theirs"
    theirs.mkdir()
    (theirs / "variables").write_text("{}")
    if how == "link":
        theirs.chmod(0o700)
        private._folder(name).symlink_to(theirs)
    else:
        theirs.rename(private._folder(name))
        private._folder(name).chmod(0o755)
    for act in (lambda: keep(name, KEPT), lambda: take(name)):
        with pytest.raises(PermissionError):
            act()
    assert len(list(private._folder(name).iterdir())) == 1


def test_nothing_else_is_removed(parent):
    for name in ("", ".", "../x", f"{new_name()}/.."):
        with pytest.raises(ValueError, match=r".*"):
            remove(name)


def test_what_killed_launchers_have_left_is_removed_after_a_day(parent):
    old, young = new_name(), new_name()
    for name in (old, young):
        keep(name, KEPT)
    os.utime(private._folder(old), (time.time() - 90_000,) * 2)
    keep(new := new_name(), KEPT)
    assert {*parent.iterdir()} == {*map(private._folder, (young, new))}


@pytest.mark.parametrize("how", ["pipe", "link"])
def test_a_launcher_does_not_open_the_lock_of_another_user(how):
    """A file of theirs may let whoever opens it wait, and a link may lead anywhere."""
    with tempfile.TemporaryDirectory(dir="/tmp") as root:  # a short path
        with own_folder({"TMPDIR": root}) as own:
            folder, aim = Path(f"{own}0"), Path(root, "aim")
        folder.mkdir()
        folder.chmod(0o755)  # that of this user is closed to others
        os.mkfifo(aim)  # whoever opens it for reading and writing removes its folder
        if how == "link":
            (folder / "owner.lock").symlink_to(aim)
        else:
            aim.rename(folder / "owner.lock")
        with own_folder({"TMPDIR": root}) as own:
            assert own.parent == Path(root)
            assert folder.is_dir()


@pytest.mark.parametrize(
    ("name", "is_used"), [("short", True), ("a b", False), ("x" * 60, False), ("gone", False)]
)
def test_an_attempt_has_a_folder_in_tmpdir_if_sockets_and_mpirun_can_use_it(name, is_used):
    """A socket's path is short, and every mpirun splits the arguments of ssh at blanks."""
    with tempfile.TemporaryDirectory(dir="/tmp") as root:
        parent = Path(root, name)
        if name != "gone":
            parent.mkdir()
        with own_folder({"TMPDIR": str(parent)}) as folder:
            assert folder.is_dir()
            assert folder.parent == (parent if is_used else Path("/tmp"))
        assert not folder.exists()


def test_an_attempt_removes_the_folders_of_killed_launchers_of_this_machine_alone(monkeypatch):
    """The lock of another machine, which shares TMPDIR, may not be seen here."""
    with tempfile.TemporaryDirectory(dir="/tmp") as root, own_folder({"TMPDIR": root}) as own:
        with monkeypatch.context() as patch:
            patch.setattr(socket, "gethostname", lambda: "another")
            with own_folder({"TMPDIR": root}) as folder:
                there = Path(shutil.copytree(folder, f"{folder}0"))  # whose lock nobody holds
        killed = Path(shutil.copytree(own, f"{own}0"))
        with own_folder({"TMPDIR": root}) as other:
            assert {*Path(root).iterdir()} == {own, other, there}
        assert not killed.exists()
