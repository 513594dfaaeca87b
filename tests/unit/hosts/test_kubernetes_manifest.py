"""The manifest of examples/kubernetes is an MPIJob, and the entry point says what is missing.

python -m pytest tests/unit/hosts/test_kubernetes_manifest.py
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.kubernetes import read_yaml
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT

FOLDER = ROOT / "examples" / "kubernetes"


ENTRY = FOLDER / "entrypoint.sh"


def test_without_a_key_the_entry_point_says_what_is_missing(tmp_path: Path) -> None:
    command = ["env", f"HOME={tmp_path}", f"SSH_KEYS={tmp_path}/none", str(ENTRY), "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert done.stderr == (
        f"entrypoint.sh: no key pair in {tmp_path}/none. Set sshAuthMountPath: {tmp_path}/none in the "
        "MPIJob.\n"
    )


def test_the_manifest_is_an_mpijob() -> None:
    """The fields of types.go that the manifest uses, and the checks of validation.go."""
    job = read_yaml((FOLDER / "mpijob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    spec = job["spec"]
    assert spec.keys() <= {
        *("slotsPerWorker", "runLauncherAsWorker", "runPolicy", "mpiReplicaSpecs"),
        *("sshAuthMountPath", "launcherCreationPolicy", "mpiImplementation"),
    }
    assert spec["runPolicy"]["cleanPodPolicy"] in ("None", "Running", "All")
    assert spec["launcherCreationPolicy"] in ("AtStartup", "WaitForWorkersReady")
    assert spec["mpiImplementation"] in ("OpenMPI", "Intel", "MPICH")
    assert spec["slotsPerWorker"] == "1"
    replicas = spec["mpiReplicaSpecs"]
    assert {name: each["replicas"] for name, each in replicas.items()} == {
        "Launcher": "1",
        "Worker": "2",
    }
    for each in replicas.values():
        assert each["restartPolicy"] in ("Never", "OnFailure")
        pod = each["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {"name", "image", "args"} <= container.keys()
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
