"""Which files belong to a program: they are compared between hosts, and mpiddp.spawn ships them.

Tests mpiddp/hosts/files.py.
"""

import sys
from pathlib import Path

import pytest

from mpiddp.hosts.files import files_of, import_folders, imported_by

TRAIN = """\
import os, random, helper, wandb, models as zoo
import mpiddp, numpy
if True:
    from pkg.sub import x
try: import optional
except ImportError: pass
from src.nets import (
    deep,  # a module
    blocks,
)
from src import \\
    wide
"""
FILES = {
    "train.py": TRAIN,
    "helper.py": "import deeper\n",
    "deeper.py": "import train\n",
    "optional.py": "",
    "stranger.py": "",
    "mpiddp.py": "",  # it has a version of its own
    "pkg/__init__.py": "from .nets import net\n",
    "pkg/sub.py": "",
    "pkg/nets/net.py": "",
    "pkg/unused/__init__.py": "",  # a package counts as a whole
    "wandb/run-1/code/old.py": "",  # wandb itself is installed
    "models/net.py": "",  # packages without an __init__.py
    "src/nets/deep.py": "from . import flat\nfrom .. import above\nfrom ..far.off import y\n",
    "src/nets/flat.py": "",
    "src/above.py": "",
    "src/far/off.py": "",
    "src/nets/blocks/__init__.py": "",
    "src/nets/blocks/block.py": "",
    "src/wide/__init__.py": "",
}
NOT_IMPORTED = {"stranger.py", "mpiddp.py", "wandb/run-1/code/old.py"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def names(*where: str | list[str]) -> list[str]:
    return [name for name, _ in files_of(*where)]


def test_the_files_of_a_script_are_those_that_it_imports(folder):
    """A module beside the script counts as the script does; others in its folder do not."""
    found = names("script", "train.py", str(folder))
    assert sorted(found) == sorted(FILES.keys() - NOT_IMPORTED)
    assert found[0] == "train.py"
    before = dict(files_of("script", "train.py", str(folder)))
    (folder / "helper.py").write_text("import deeper  # changed\n")
    after = dict(files_of("script", "train.py", str(folder)))
    assert {name for name in before if before[name] != after[name]} == {"helper.py"}


def test_the_files_of_a_module(folder):
    """python -m PACKAGE.MODULE, with an __init__.py or without one, and what an installed module imports."""
    package = {"pkg/__init__.py", "pkg/sub.py", "pkg/nets/net.py", "pkg/unused/__init__.py"}
    assert {*names("module", "pkg.sub", str(folder))} == package
    src = {"src/above.py", "src/far/off.py", "src/nets/deep.py", "src/nets/flat.py"}
    assert {*names("module", "src.nets.deep", str(folder))} == src
    assert "pkg/sub.py" in names("module", "train", str(folder))
    assert names("module", "json.tool", str(folder)) == []
    assert names("command", "train.py", str(folder)) == []


def test_a_link_leads_to_the_folder_whose_modules_are_imported(folder):
    (folder / "bin").mkdir()
    (folder / "bin/run").symlink_to("../helper.py")
    assert names("script", "bin/run", str(folder))[:2] == ["helper.py", "deeper.py"]


def test_modules_of_other_folders_count_and_installed_ones_do_not(folder, monkeypatch):
    """PYTHONPATH, and what an editable install adds to sys.path. The first folder with a module counts."""
    other, editable = folder / "lib", folder / "project"
    for each in (other, editable):
        each.mkdir()
        (each / "helper.py").touch()
    (other / "mylib.py").touch()
    (editable / "edited.py").touch()
    (folder / "main.py").write_text("import helper, mylib, edited, json, torch, pytest\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", "lib")
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path[1:], str(editable)])
    found = names("script", "main.py", str(folder), import_folders())
    assert {*found} == {
        *("main.py", "helper.py", "deeper.py", "train.py", "lib/mylib.py", "project/edited.py"),
        *names("script", "train.py", str(folder)),
    }


def test_a_file_that_cannot_be_read_has_no_digest(tmp_path):
    assert files_of("script", "gone.py", str(tmp_path)) == [("gone.py", "")]


def test_what_lines_import():
    text = (
        b"import a.b as c, d; import e\nfrom .f import g as h\nfrom . import i\nfrom j import *\n"
    )
    found = {"a.b", "d", "e", ".f", ".f.g", ".i", "j"}
    assert imported_by(text) == found
