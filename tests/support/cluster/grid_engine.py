"""A real Grid Engine on a test cluster: sge_execd on every host, sge_qmaster on the first.

with cluster.up(2) as c:
    grid_engine.start(c).qsub("#!/bin/sh\\ncat $PE_HOSTFILE\\n", "-pe", "fill", "4")
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

from tests.support.cluster.host import ETC, TMPDIR, Arg, Host
from tests.support.cluster.start import Cluster
from tests.support.patience import eventually

_DEBIAN = Path("/usr/share/gridengine")  # the packages' templates
_LIBRARY = Path("/usr/lib/gridengine")
_LOCAL = "/run/gridengine"  # on a private tmpfs of each host

_BOOTSTRAP = (ETC / "grid_engine_bootstrap").read_text(encoding="utf-8")
_EXECUTION_HOST = (ETC / "grid_engine_execution_host").read_text(encoding="utf-8")
# Tight integration: Grid Engine starts, counts and kills the programs on the other hosts, too.
_PARALLEL_ENVIRONMENT = (ETC / "grid_engine_parallel_environment").read_text(encoding="utf-8")
# Their names, rules and control_slaves. `loose` gives no way to start programs on other hosts.
_ENVIRONMENTS = (
    ("fill", "$fill_up", "TRUE"),
    ("spread", "$round_robin", "TRUE"),
    ("loose", "$round_robin", "FALSE"),
)
# What differs from Debian's configuration: root may submit, and the scheduler does not wait.
_CONFIGURATION = {"execd_spool_dir": f"{_LOCAL}/execd", "min_uid": "0", "min_gid": "0"}
_SCHEDULER = {"schedule_interval": "0:0:1", "flush_submit_sec": "1", "flush_finish_sec": "1"}


@dataclass(frozen=True)
class GridEngine:
    """A running Grid Engine. Its commands work on every host, for every user, with `env`."""

    cluster: Cluster
    env: Mapping[str, str]

    def qsub(
        self, script: str, *options: str, env: Mapping[str, str], cwd: Arg, user: str | None = None
    ) -> CompletedProcess[str]:
        """Submit a job script from the first host, and wait for its end.

        Returns its exit code, and its whole output as stdout.

        Raises:
            subprocess.CalledProcessError: qsub refuses the script.
        """
        login = self.cluster.hosts[0]
        job = self.cluster.shared / f"job-{os.urandom(4).hex()}"
        output, code = job.with_suffix(".out"), job.with_suffix(".code")
        job.write_text(script)
        for file in (output, code):
            file.touch()
            file.chmod(0o666)
        variables = [option for pair in env.items() for option in ("-v", "=".join(pair))]
        command = ["qsub", "-terse", "-j", "y", "-o", str(output), "-S", "/bin/sh", *variables]
        command += ["-wd", str(cwd), *options]
        # `qsub -sync y` sometimes misses the end of a job, and then exits with 0.
        text = f"sh {job}; echo $? > {code}\n"
        number = login.run(command, env=self.env, user=user, stdin=text, check=True).stdout.strip()
        try:
            eventually(lambda: code.read_text().endswith("\n"))
        except TimeoutError as error:
            state = login.run(["qstat", "-j", number], env=self.env).stdout
            raise TimeoutError(
                f"{error} for job {number}:\n{output.read_text()}\n{state}"
            ) from error
        return CompletedProcess(command, int(code.read_text()), output.read_text(), "")


def start(cluster: Cluster) -> GridEngine:
    """Start Grid Engine on all hosts of `cluster`, with four slots each. Its daemons end with the cluster."""
    master = cluster.hosts[0]
    root = cluster.shared / "gridengine"  # as on a file server
    env = {
        "SGE_ROOT": str(root),
        "SGE_CELL": "default",
        "SGE_QMASTER_PORT": "6444",
        "SGE_EXECD_PORT": "6445",
    }
    _make_cell(root, master)
    for host in cluster.hosts:
        defaults = "".join(f"{name}={value}\n" for name, value in env.items())
        host.path("/etc/default/gridengine").write_text(defaults)
        host.path(f"{_LOCAL}/execd").mkdir(parents=True)
    _spool(master, root, env)
    master.run(["sge_qmaster"], env=env, check=True)
    eventually(lambda: "execd_spool_dir" in master.run(["qconf", "-sconf"], env=env).stdout)
    _configure(cluster, env)
    for host in cluster.hosts:
        host.run(["sge_execd"], env=env, check=True)
    eventually(lambda: _loads_are_known(master, env, len(cluster.hosts)))
    return GridEngine(cluster, env)


def _make_cell(root: Path, master: Host) -> None:
    (root / "default/common").mkdir(parents=True)
    for folder in ("bin", "utilbin", "lib"):
        (root / folder).mkdir()
        (root / folder / "lx-amd64").symlink_to(_LIBRARY)
    (root / "util").symlink_to(_DEBIAN / "util")
    (root / "default/common/bootstrap").write_text(_BOOTSTRAP.format(root=root))
    (root / "default/common/act_qmaster").write_text(f"{master.name}\n")
    for folder in ("spooldb", "qmaster/job_scripts"):
        (root / folder).mkdir(parents=True)
    text = (_DEBIAN / "default-configuration").read_text()
    (root / "configuration").write_text(_changed(text, _CONFIGURATION))


def _changed(text: str, values: Mapping[str, str]) -> str:
    """A configuration of Grid Engine with other values."""
    lines = [(line.split(" ")[0], line) for line in text.splitlines()]
    return "".join(
        f"{name} {values[name]}\n" if name in values else f"{line}\n" for name, line in lines
    )


def _spool(master: Host, root: Path, env: Mapping[str, str]) -> None:
    """The steps of Debian's init_cluster, with root as the manager."""
    resources = _DEBIAN / "util/resources"
    for command in (
        ["spoolinit", "berkeleydb", "libspoolb", root / "spooldb", "init"],
        ["spooldefaults", "configuration", root / "configuration"],
        ["spooldefaults", "complexes", resources / "centry"],
        ["spooldefaults", "usersets", resources / "usersets"],
        ["spooldefaults", "managers", "root"],
    ):
        program, *arguments = map(str, command)
        master.run([_LIBRARY / program, *arguments], env=env, check=True)


def _configure(cluster: Cluster, env: Mapping[str, str]) -> None:
    master = cluster.hosts[0]

    def qconf(*arguments: str) -> str:
        done = master.run(["qconf", *arguments], env=env)
        if done.returncode != 0:
            raise RuntimeError(f"qconf {' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done.stdout.replace("\\\n", " ")  # it breaks long lines

    def add(option: str, text: str) -> None:
        file = f"{_LOCAL}/{option}"
        master.path(file).write_text(text)
        qconf(option, file)

    for host in cluster.hosts:
        qconf("-ah", host.name)
        qconf("-as", host.name)
        add("-Ae", _EXECUTION_HOST.format(host=host))
    for name, rule, control_slaves in _ENVIRONMENTS:
        facts = {"name": name, "rule": rule, "control_slaves": control_slaves}
        add("-Ap", _PARALLEL_ENVIRONMENT.format(**facts))
    queue = {
        "qname": "all.q",
        "hostlist": " ".join(host.name for host in cluster.hosts),
        "pe_list": " ".join(name for name, *_ in _ENVIRONMENTS),
        "slots": "4",
        "tmpdir": TMPDIR,  # the hosts share /tmp, and each removes the job's folder when its task ends
        "shell": "/bin/sh",
        "load_thresholds": "NONE",  # the hosts share the processors of this machine
    }
    add("-Aq", _changed(qconf("-sq"), queue))
    add("-Msconf", _changed(qconf("-ssconf"), _SCHEDULER))


def _loads_are_known(master: Host, env: Mapping[str, str], count: int) -> bool:
    """Whether every execution host has reported its load."""
    output = master.run(["qstat", "-f"], env=env).stdout
    hosts = [line for line in output.splitlines() if line.startswith("all.q@")]
    return len(hosts) == count and "-NA-" not in output
