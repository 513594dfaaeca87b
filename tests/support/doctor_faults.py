"""Faults of set-ups, each with the line of `mpiddp doctor` that names it, on four hosts of the test cluster.

with prepared() as hosts, FAULTS["low nofile"].inject(hosts):
    code, warnings, unknown = doctor(hosts)  # "limits fail a process may open 256 files on node3 …"
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.support import cluster
from tests.support.cluster import Cluster, faults, ssh
from tests.support.cluster.faults import between, shelled
from tests.support.cluster.host import ROOT_PATH, Host
from tests.support.machine import GPU_ROW, SECOND_GPU, nvidia_smi
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT

BIN = Path(sys.executable).parent
WORK = "/run/work"  # each host has its own /run
PYTHON, GPU_TOOL = "/run/env/bin/python", "/run/tools/nvidia-smi"
HOSTS = 4
ECC, GPU = "ecc.errors.uncorrected.volatile.total", GPU_ROW["uuid"]
NAMES = ",".join(f"node{number}" for number in range(HOSTS))
# As a firewall does: byte 47 of a frame has TCP's flags, 30 to 33 the target, 36 and 37 its port.
# A SYN alone to 10.77.0.2 is dropped (2), all else passes (0).
NO_SYN_TO_NODE1 = "6,48 0 0 47,21 0 3 2,32 0 0 30,21 0 1 172818434,6 0 0 2,6 0 0 0"
# A frame of more than 1000 bytes to 10.77.0.2.
NO_LARGE_TO_NODE1 = "6,32 0 0 30,21 0 3 172818434,128 0 0 0,37 0 1 1000,6 0 0 2,6 0 0 0"


@dataclass(frozen=True)
class Fault:
    """A fault of a host, which a line of the doctor names together with these words, a pattern.

    also: a pattern of what follows from it, which is no false alarm.
    """

    host: str
    words: str
    inject: Callable[[Cluster], AbstractContextManager[object]]
    also: str = "(?!)"  # nothing

    def is_named(self, line: str) -> bool:
        return self.host in line and re.search(self.words, line) is not None

    def explains(self, line: str) -> bool:
        return self.is_named(line) or re.search(self.also, line) is not None


@contextmanager
def prepared() -> Iterator[Cluster]:
    """Hosts with folders of their own, an environment under a path of its own, and one GPU each."""
    with cluster.up_or_skip(HOSTS) as standing:
        for host in standing.hosts:
            shell(host, f"mkdir -p {WORK}/runs {WORK}/data /run/env /run/tools")
            shell(host, f"ln -s {BIN.parent}/* /run/env; rm /run/env/bin; mkdir /run/env/bin")
            shell(host, f"ln -s {BIN}/* /run/env/bin; echo 1 >{WORK}/data/file")
            shell(host, f"echo 'import model' >{WORK}/train.py; echo 'X = 1' >{WORK}/model.py")
            shell(host, f"cat >{GPU_TOOL}; chmod +x {GPU_TOOL}", f"#!/bin/sh\n{nvidia_smi({})}")
        yield standing


def doctor(hosts: Cluster, *arguments: str, names: str = NAMES) -> tuple[int, list[str], list[str]]:
    """The exit code of `mpiddp doctor` on node0, its warnings and failures, and what it does not know."""
    command = [PYTHON, "-m", "mpiddp", "doctor", "-H", names, "--json", *arguments]
    env = {"PATH": f"/run/tools:{ROOT_PATH}"}
    done = hosts["node0"].run(command, cwd=WORK, env=env, timeout_s=2 * PATIENCE_S)
    assert done.stderr == ""
    lines: dict[str, list[str]] = {"ok": [], "warn": [], "fail": [], "unknown": []}
    for line in json.loads(done.stdout)["lines"]:
        lines[line["status"]].append(" ".join(map(str, line.values())))
    return done.returncode, lines["warn"] + lines["fail"], lines["unknown"]


def shell(host: Host, script: str, stdin: str | None = None) -> None:
    host.run(["sh", "-ec", script], stdin=stdin, check=True)


# --- faults, until the end of a block ---


def gpu_tool(host: Host, *gpus: dict[str, str], users: str = "") -> AbstractContextManager[None]:
    text = f"#!/bin/sh\n{nvidia_smi(*(gpus or [{}]), users=users)}"
    return faults.changed(host, GPU_TOOL, lambda _: text)


def renamed(host: Host, path: str) -> AbstractContextManager[None]:
    return shelled(host, f"mv {path} {path}.away", f"rm -rf {path}; mv {path}.away {path}")


def other_mpi(host: Host) -> AbstractContextManager[None]:
    write = r"""printf "#!/bin/sh\necho 'mpirun (Open MPI) 4.1.8'\n" >mpirun; chmod +x mpirun"""
    begin = f"cd /run/env/bin; mv mpirun mpirun.away; {write}"
    return shelled(host, begin, "cd /run/env/bin; mv mpirun.away mpirun")


def other_python(host: Host, write_packages: str) -> AbstractContextManager[None]:
    """An interpreter that finds the packages first that a shell command writes."""
    wrapper = f'#!/bin/sh\nPYTHONPATH=/run/other exec {sys.executable} "$@"\n'
    begin = f"mkdir -p /run/other; cd /run/other; {write_packages}"
    begin += f"; rm {PYTHON}; cat >{PYTHON}; chmod +x {PYTHON}"
    end = f"rm -rf /run/other {PYTHON}; ln -s {BIN}/python {PYTHON}"
    return between(partial(shell, host, begin, wrapper), partial(shell, host, end))


@contextmanager
def limited(host: Host, kind: str, value: int) -> Iterator[None]:
    """A limit of sshd, and so of all that it starts."""
    shell(host, f"prlimit --pid=$(cat /run/sshd.pid) --{kind}={value}:{value}")
    try:
        yield
    finally:  # only a new process may have more
        ssh.stop_sshd(host)
        ssh.start_sshd([host])


def filtered(host: Host, program: str) -> AbstractContextManager[None]:
    add = f"tc filter add dev eth0 egress bpf da bytecode '{program}'"
    return shelled(host, f"tc qdisc add dev eth0 clsact; {add}", "tc qdisc del dev eth0 clsact")


def foreign_libmpi(host: Host) -> AbstractContextManager[None]:
    """mpi4py loads the library of Open MPI 4 at the path of Open MPI 5."""
    (library,) = BIN.parent.glob("lib/libmpi.so.40")
    (foreign,) = (ROOT / ".mpi" / "openmpi4").rglob("libmpi.so.40")
    return faults.mounted(host, library.resolve(), what=foreign.resolve())


def other_name(host: Host, before: str, after: str) -> AbstractContextManager[None]:
    return faults.changed(host, "/etc/hosts", lambda text: text.replace(before, after))


def on(
    host: str,
    words: str,
    inject: Callable[..., AbstractContextManager[object]],
    *args: Any,
    at: str = "",
    also: str = Fault.also,
    **more: Any,
) -> Fault:
    """A fault that is injected into the host that the doctor names, or into the host `at`."""
    return Fault(host, words, lambda hosts: inject(hosts[at or host], *args, **more), also)


def broken(package: str) -> str:
    return f"mkdir {package}; echo 'raise ImportError' >{package}/__init__.py"


OF_VERSION = "Metadata-Version: 2.1\\nName: torch\\nVersion: 2.12.1\\n"
OTHER_TORCH = (
    f"mkdir torch-2.12.1.dist-info; printf '{OF_VERSION}' >torch-2.12.1.dist-info/METADATA"
)
BLACKHOLE = "blackhole 10.77.0.3/32"
FAULTS: Mapping[str, Fault] = {
    "wrong key": on("node1", r"\(publickey\).*ssh-copy-id", faults.key_refused),
    "unknown host key": Fault(
        "node2", "host key is unknown", lambda hosts: faults.unknown_key(hosts, hosts["node2"])
    ),
    "stopped sshd": on("node3", "connection refused", faults.no_sshd),
    "unresolvable name": Fault("nowhere", "cannot be resolved", lambda hosts: ExitStack()),
    "interpreter missing": on("node1", f"{PYTHON} is missing", renamed, PYTHON),
    "daemon missing": on("node2", "prted is missing", renamed, "/run/env/bin/prted"),
    "host down": on("node3", "no (answer in|route from)", faults.unreachable),
    "working folder missing": on(
        *("node1", f"folder {WORK} is missing", renamed, WORK),
        also=f"missing on node1|{WORK}.* on node1",
    ),
    "Open MPI 4 beside 5": on("node2", r"mpirun differs: .*4\.1\.8", other_mpi),
    "own name is 127.0.1.1": on(
        "node1", r"127\.0\.1\.1", other_name, "10.77.0.2 node1", "127.0.1.1 node1"
    ),
    "name unknown on one host": on(
        "node1", "node2 cannot be resolved", faults.without_lines, "/etc/hosts", "node2"
    ),
    "name leads elsewhere": on(
        "node2", r"node3 .*10\.77\.0\.99", other_name, "10.77.0.4", "10.77.0.99"
    ),
    "another torch": on(
        *("node1", r"torch differs: .*2\.12\.1", other_python, f"{broken('torch')}; {OTHER_TORCH}"),
        also="torch does not load on node1",
    ),
    "torch does not load": on(
        *("node1", "torch does not load", other_python, broken("torch")),
        also="torch (differs|is)|job fail exit code 1",
    ),
    "mpi4py does not load": on(
        *("node3", "mpi4py does not load", other_python, broken("mpi4py")),
        also="mpi4py (differs|is)",
    ),
    "another mpiddp": on(
        *("node3", "mpiddp is", other_python), f"cp -r {ROOT}/mpiddp .; echo >>mpiddp/text.py"
    ),
    "foreign libmpi": on("node2", "mpi4py|libmpi", foreign_libmpi, also="versions .*node2"),
    "another driver": on("node1", r"535\.2", gpu_tool, {"driver_version": "535.2"}),
    "memory errors of a GPU": on("node2", "uncorrected memory errors", gpu_tool, {ECC: "3"}),
    "another user of a GPU": on(
        "node0", r"in use: pid 1 of root \(", gpu_tool, users=f"{GPU}, 1, 70000"
    ),
    "another number of GPUs": on("node3", "number of GPUs is 2", gpu_tool, {}, SECOND_GPU),
    "script changed": on(
        "node2", "train.py is", faults.changed, f"{WORK}/train.py", lambda text: "print(2)\n"
    ),
    "module missing": on("node1", "model.py is missing", renamed, f"{WORK}/model.py"),
    "data missing": on("node2", f"{WORK}/data cannot be used", renamed, f"{WORK}/data"),
    "port blocked one way": on(
        "node1", "node2 → node1.*no answer", filtered, NO_SYN_TO_NODE1, at="node2"
    ),
    "large packets lost": on(
        "node1", "node2 → node1.*no large ones", filtered, NO_LARGE_TO_NODE1, at="node2"
    ),
    "blackholed route": on(
        *("node3", "node3 → node2.*no route|node2 → node3.*no answer", shelled),
        *(f"ip route add {BLACKHOLE}", f"ip route del {BLACKHOLE}"),
    ),
    "low nofile": on("node3", "256 files", limited, "nofile", 256),
    "small /dev/shm": on("node3", "/dev/shm", faults.mounted, "/dev/shm", "-o", "size=16m"),
    "read-only /dev/shm": on("node1", "/dev/shm has 0 B", faults.mounted, "/dev/shm", "-o", "ro"),
}
