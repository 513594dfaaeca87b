"""examples/kubernetes: the manifest's structure, and the entry point on hosts that look like a job's pods.

No Kubernetes runs here. The fields, variables, mounts and the key come from the source of the MPI operator
0.8.2: pkg/apis/kubeflow/v2beta1/types.go and pkg/controller/mpi_job_controller.go.

python -m pytest tests/cluster/schedulers/test_kubernetes_example.py
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support import cluster
from tests.support.cluster import Cluster, Host
from tests.support.cluster.ssh import stop_sshd
from tests.support.kubernetes import read_yaml
from tests.support.mpis import mpirun_of
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT

FOLDER = ROOT / "examples" / "kubernetes"
ENTRY = FOLDER / "entrypoint.sh"
JOB = ("train-worker-0.train.default.svc", "train-worker-1.train.default.svc")
# ompiEnvVars and launcherEnvVars of mpi_job_controller.go, and what it unsets for a launcher without GPUs.
POD = {
    "K_MPI_JOB_ROLE": "launcher",
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
    "NVIDIA_VISIBLE_DEVICES": "",
    "NVIDIA_DRIVER_CAPABILITIES": "",
}


@pytest.fixture(scope="module")
def pods() -> Iterator[Cluster]:
    """A launcher (node0) and two workers, with the operator's key, hostfile and names."""
    with cluster.up_or_skip(3) as standing:
        key = standing.shared / "id"
        command = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-f", key]
        subprocess.run(command, check=True, timeout=PATIENCE_S)
        workers = standing.hosts[1:]
        names = "".join(f"{pod.address} {name}\n" for pod, name in zip(workers, JOB, strict=True))
        for pod in standing.hosts:
            stop_sshd(pod)
            pod.run(["rm", "-r", f"{pod.home()}/.ssh"], check=True)
            keys = pod.path("/etc/mpiddp/ssh")
            keys.mkdir(parents=True, mode=0o777)  # as a mounted secret has it
            for name, source in (("id_rsa", key), ("id_rsa.pub", key.with_suffix(".pub"))):
                (keys / name).write_bytes(source.read_bytes())
            with pod.path("/etc/hosts").open("a") as hosts:
                hosts.write(names)
        pod = standing.hosts[0]
        pod.path("/etc/mpi").mkdir()
        pod.path("/etc/mpi/hostfile").write_text("".join(f"{name} slots=1\n" for name in JOB))
        sshd = [pod.popen([ENTRY, "worker"]) for pod in workers]
        try:
            for each in sshd:
                assert each.stderr is not None
                next(line for line in each.stderr if "Server listening" in line)
            yield standing
        finally:
            for each in sshd:
                each.end()


LAUNCH = [ENTRY, sys.executable, "-m", "mpiddp", "launch"]  # through the entry point
ENV = {**POD, "PYTHONPATH": str(ROOT)}
EXAMPLE = str(ROOT / "examples/message_passing.py")


def launch(pod: Host, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The launcher's command with the operator's variables."""
    return pod.run([*LAUNCH, *arguments], cwd=ROOT, env=ENV, timeout_s=PATIENCE_S)


def manifests_options() -> list[str]:
    """The options of `mpiddp launch` in the manifest, up to the training."""
    spec = read_yaml((FOLDER / "mpijob.yaml").read_text())["spec"]
    launcher = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    arguments: list[str] = launcher["args"]
    assert arguments[:2] == ["mpiddp", "launch"]
    return arguments[2 : arguments.index("-m")]


@pytest.mark.parametrize("mpi", ["openmpi5", "openmpi4"])
def test_the_launcher_starts_the_ranks_in_the_workers(pods: Cluster, mpi: str) -> None:
    """Without --hostfile: the operator's variable names the hostfile."""
    options = [*manifests_options(), "--mpirun", mpirun_of(mpi)]
    assert not any("hostfile" in option for option in options)
    done = launch(pods["node0"], *options, "--report", EXAMPLE)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(\d) +(node\d)", done.stdout, re.MULTILINE) == [
        ("0", "node1"),
        ("1", "node2"),
    ]
    assert "worker_1 has received data from rank 0" in done.stdout


def test_the_launcher_waits_for_a_pod_whose_name_does_not_resolve_yet(pods: Cluster) -> None:
    names = pods["node0"].path("/etc/hosts")
    whole = names.read_text()
    names.write_text("".join(line for line in whole.splitlines(True) if JOB[1] not in line))
    command = [*LAUNCH, *manifests_options(), EXAMPLE]
    try:
        with pods["node0"].popen(command, cwd=ROOT, env=ENV) as job:
            assert job.stderr is not None
            next(line for line in job.stderr if f"waiting for {JOB[1]} (up to " in line)
            names.write_text(whole)
            _, stderr = job.communicate(timeout=PATIENCE_S)
    finally:
        names.write_text(whole)
    assert job.returncode == 0, stderr
    assert "all 2 hosts answer after " in stderr


def test_ssh_refuses_a_host_without_the_jobs_key(pods: Cluster) -> None:
    """The entry point switches off no check: a pod of another job has another key."""
    pod = pods["node0"]
    launch(pod, "--help")  # the entry point writes the keys
    known = pod.path(f"{pod.home()}/.ssh/known_hosts")
    assert pod.run(["ssh", "-o", "BatchMode=yes", JOB[0], "true"]).returncode == 0
    written = known.read_text()
    _, kind, key = written.split()
    try:
        known.write_text(f"* {kind} {key[:-8]}AAAAAAA=\n")
        done = pod.run(["ssh", "-o", "BatchMode=yes", JOB[0], "true"])
    finally:
        known.write_text(written)
    assert done.returncode == 255
    assert "Host key verification failed" in done.stderr
