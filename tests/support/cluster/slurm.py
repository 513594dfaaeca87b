"""A real Slurm on a test cluster: munged and slurmd on every host, slurmctld on the first.

with cluster.up(2) as c:
    s = slurm.start(c)
    c["node0"].run(["srun", "-N2", "--ntasks-per-node=2", "hostname"])
    s.sbatch("#!/bin/sh\\nsrun hostname\\n", "-N2")
"""

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.cluster import needs
from tests.support.cluster.host import ETC, Host
from tests.support.cluster.start import Cluster
from tests.support.patience import PATIENCE_S, eventually

_FOLDERS = ("/run/munge", "/run/slurm")  # on a private tmpfs of each host

# It has no cgroups and no binding, because the hosts share this machine's cores.
_SLURM_CONF = (ETC / "slurm.conf").read_text(encoding="utf-8")
_NODE = "NodeName={host.name} NodeAddr={host.address} CPUs=4 RealMemory=64000 Gres=gpu:2\n"
_GRES_CONF = "Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n"
_CGROUP_CONF = "CgroupPlugin=cgroup/v1\n"  # v2 needs systemd

_MUNGED = [
    "munged",
    "--key-file=/run/munge/key",
    "--socket=/run/munge/munge.socket.2",  # the path that Slurm's plugin expects
    "--pid-file=/run/munge/pid",
    "--log-file=/run/munge/log",
    "--seed-file=/run/munge/seed",
]

_UNFINISHED = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")


@dataclass(frozen=True)
class Slurm:
    """A running Slurm. Its commands work on every host, for every user."""

    cluster: Cluster

    def sbatch(self, script: str, *options: str, **login: Any) -> subprocess.CompletedProcess[str]:
        """Submit a batch script from the first host, and wait for its end; `login` as of `Host.run`.

        Returns its exit code (-N after signal N), and its whole output as stdout.

        Raises:
            subprocess.CalledProcessError: sbatch refuses the script.
        """
        output = self.cluster.shared / f"job-{os.urandom(4).hex()}.out"
        code = self.wait(self.submit(script, output, *options, **login), output)
        return subprocess.CompletedProcess(options, code, output.read_text(), "")

    def submit(self, script: str, output: Path, *options: str, **login: Any) -> str:
        """Submit a batch script from the first host, and return the number of its job."""
        command = ["sbatch", "--parsable", f"--output={output}", *options]
        return self.cluster.hosts[0].run(command, stdin=script, check=True, **login).stdout.strip()

    def wait(self, job: str, output: Path) -> int:
        """Wait for a job's end, and return its exit code."""
        login = self.cluster.hosts[0]
        try:
            (code,) = eventually(lambda: _exit_code(login, job), poll_s=0.3)
        except TimeoutError:
            login.run(["scancel", job])
            raise TimeoutError(f"job {job} wrote: {output.read_text(encoding='utf-8')}") from None
        return code

    def shown(self, job: str) -> str:
        """The job as `scontrol show job` prints it."""
        return self.cluster.hosts[0].run(["scontrol", "show", "job", job], check=True).stdout

    def wait_until_idle(self) -> None:
        """Wait until every node can take a job."""
        states = ["sinfo", "--noheader", "--Node", "--partition=test", "--format=%T"]
        login, idle = self.cluster.hosts[0], ["idle"] * len(self.cluster.hosts)
        eventually(lambda: login.run(states).stdout.split() == idle)

    @contextmanager
    def killed(self, host: Host) -> Iterator[None]:
        """Slurm's daemons on the host are killed, those of jobs as well, until the end of the block."""
        daemons = [
            str(process.pid)
            for process in host.processes()
            if process.name in ("slurmd", "slurmstepd")
        ]
        host.run(["kill", "-KILL", *daemons], check=True)
        try:
            yield
        finally:
            _daemon([host], ["slurmd"])


@contextmanager
def up_or_skip(cluster: Cluster, *, credentials_s: int = 120) -> Iterator[Slurm]:
    """`start` for a pytest fixture, whose end kills all processes of the hosts. Skips without Slurm."""
    if reason := needs.why_no_slurm():
        needs.lacking(reason)
    try:
        yield start(cluster, credentials_s=credentials_s)
    finally:
        for host in cluster.hosts:
            host.kill_processes()
            host.run(["rm", "-rf", *_FOLDERS])


def start(cluster: Cluster, *, credentials_s: int = 120) -> Slurm:
    """Start Slurm on all hosts of `cluster`, with four CPUs each. Its daemons end with the cluster.

    A job that is requeued waits until its credentials have expired.
    """
    hosts = cluster.hosts
    munge_key = os.urandom(64)
    conf = _SLURM_CONF.format(controller=hosts[0], credentials_s=credentials_s)
    conf += "".join(_NODE.format(host=host) for host in hosts)
    for host in hosts:
        for folder in (*_FOLDERS, "/etc/slurm"):
            host.path(folder).mkdir(exist_ok=True)
        host.path("/run/munge/key").touch(mode=0o600)
        host.path("/run/munge/key").write_bytes(munge_key)
        host.path("/etc/slurm/slurm.conf").write_text(conf)
        host.path("/etc/slurm/cgroup.conf").write_text(_CGROUP_CONF)
        host.path("/etc/slurm/gres.conf").write_text(_GRES_CONF)
    _daemon(hosts, _MUNGED)
    _daemon(hosts[:1], ["slurmctld"])
    eventually(lambda: "is UP" in hosts[0].run(["scontrol", "ping"]).stdout)
    _daemon(hosts, ["slurmd"])
    slurm = Slurm(cluster)
    slurm.wait_until_idle()
    return slurm


def _daemon(hosts: Sequence[Host], daemon: Sequence[str]) -> None:
    """Start a daemon, which moves to the background itself, on all hosts in parallel."""
    for host, program in [(host, host.popen(daemon)) for host in hosts]:
        with program:
            _, stderr = program.communicate(timeout=PATIENCE_S)
        if program.returncode != 0:
            raise RuntimeError(f"{daemon[0]} on {host.name}: {stderr}")


def _exit_code(host: Host, job: str) -> tuple[int, ...]:
    """A job's exit code, or none until the job has ended."""
    stdout = host.run(["scontrol", "--oneliner", "show", "job", job], check=True).stdout
    match = re.search(r"JobState=(\w+) .*ExitCode=(\d+):(\d+)", stdout)
    assert match, stdout
    state, code, signal = match.groups()
    if state in _UNFINISHED:
        return ()
    return (-int(signal) if int(signal) else int(code),)
