"""What a folder needs outside of itself, before it is pushed.

Tests mpiddp/hosts/cluster/stands_on.py, and the folders that push.py takes by default.
python -m pytest tests/unit/hosts/test_what_a_folder_needs.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mpiddp.errors import UserError
from mpiddp.hosts.cluster.push import default_folders
from mpiddp.hosts.cluster.stands_on import has_programs, needs, pythons
from mpiddp.hosts.cluster.tree import FILE, LINK, Row
from tests.support.errors import error


def row(path: str, kind: object = FILE, target: str = "") -> Row:
    return [path, kind, 0o644, 0, 0, target]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ([], False),
        (["train.py", "data.so.txt", "so", "notes/pyvenv.cfg.bak"], True),
        (["train.py", "sofa", "notes/pyvenv.cfg.bak", "libx.sox"], False),
        (["lib/fast.so"], True),
        (["lib/libx.so.6"], True),
        (["env/pyvenv.cfg"], True),
    ],
)
def test_programs_run_on_one_kind_of_machine(names: list[str], found: bool) -> None:
    assert has_programs([row(name) for name in names]) is found


def test_what_leads_out_of_the_folders(tmp_path: Path) -> None:
    """Links, the interpreter of an environment, and paths in .pth files, where they exist."""
    pushed, outside = tmp_path / "pushed", tmp_path / "outside"
    site = pushed / "env/site-packages"
    site.mkdir(parents=True)
    (outside / "bin").mkdir(parents=True)
    python, package = outside / "bin/python3.11", outside / "package"
    python.touch()
    (outside / "bin/python3").symlink_to("python3.11")
    package.mkdir()
    (pushed / "env/pyvenv.cfg").write_text(
        f"home = /elsewhere\nexecutable = {outside}/bin/python3\n"
    )
    (site / "a.pth").write_text(f"import os; os\n{package}\n{pushed}/inner\n/no/such/path\n")
    (pushed / "inner").mkdir()
    for name in ("notes.txt", "weights.pth"):  # which Python does not read
        (pushed / name).write_text(f"{package}\n")
    rows = [
        row("env/pyvenv.cfg"),
        row("env/site-packages/a.pth"),
        row("notes.txt"),
        row("weights.pth"),
        row("env/site-packages/gone.pth"),
        row("env/own", LINK, "../inner"),
        row("env/data", LINK, "../../outside/package"),
        row("env/broken", LINK, "/no/such/path"),
    ]
    environment = f"{pushed}/env/pyvenv.cfg"
    assert needs([(str(pushed), rows)]) == [
        [f"{outside}/bin/python3", environment],
        [str(python), environment],
        [str(package), f"{site}/a.pth"],
    ]
    assert needs([(str(pushed), rows), (str(outside), [])]) == []
    found = needs([(str(pushed), rows)])
    assert pythons(found) == [str(outside)]
    assert pythons([[str(package), "x"], [str(outside / "bin/tool"), "x"]]) == []


@pytest.mark.parametrize("prefix", ["/usr", "/bin", "/lib", "/lib64", "/opt/rh"])
def test_the_python_of_the_system_is_not_pushed(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "resolve", lambda self: self)  # /bin may lead to /usr/bin here
    refused = error("which belongs", "--with-python: env ", f" {prefix}/bin/python3,")
    with pytest.raises(UserError, match=refused):
        pythons([[f"{prefix}/bin/python3", "env"]])
    assert pythons([[f"{prefix}-own/bin/python3", "env"]]) == [f"{prefix}-own"]


@pytest.mark.parametrize(
    ("has_base", "is_conda", "is_inside", "takes_prefix"),
    [
        (True, False, False, True),
        (True, False, True, False),
        (False, True, False, True),
        (False, True, True, False),
        (False, False, False, False),
    ],
)
def test_an_environment_elsewhere_is_pushed_as_well(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_base: bool,
    is_conda: bool,
    is_inside: bool,
    takes_prefix: bool,
) -> None:
    here = tmp_path / "here"
    prefix = (here if is_inside else tmp_path) / "env"
    prefix.mkdir(parents=True)
    if is_conda:
        (prefix / "conda-meta").mkdir()
    monkeypatch.setattr(sys, "prefix", str(prefix))
    monkeypatch.setattr(sys, "base_prefix", "/usr" if has_base else str(prefix))
    assert default_folders(str(here)) == [str(here), *[str(prefix)] * takes_prefix]
