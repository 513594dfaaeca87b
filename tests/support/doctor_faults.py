"""Faults of set-ups, each with the line of `mpiddp doctor` that names it, on four hosts of the test cluster.

with prepared() as hosts, FAULTS["small MTU"].inject(hosts):
    doctor(hosts)  # "network warn the MTU is 1400 on node3 …"
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import cluster
from tests.support.cluster import Cluster, faults, needs, ssh
from tests.support.cluster.host import ROOT_PATH, Host
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT

BIN = Path(sys.executable).parent
WORK = "/run/work"  # each host has its own /run
PYTHON = "/run/env/bin/python"
HOSTS = 4
NAMES = ",".join(f"node{number}" for number in range(HOSTS))
GPU_TOOL = """#!/bin/sh
case "$*" in
  -L) for number in {numbers}; do echo "GPU $number: NVIDIA H200 (UUID: GPU-$number)"; done ;;
  *query-gpu*) for number in {numbers}; do
    echo "$number, NVIDIA H200, 143771, 0, {driver}, 1980, {errors}"; done ;;
  *query-compute*) {users} ;;
esac
"""
# As a firewall does: byte 47 of a frame has TCP's flags, 30 to 33 the target, 36 and 37 its port.
# A SYN alone to 10.77.0.2 is dropped (2), all else passes (0).
NO_SYN_TO_NODE1 = "6,48 0 0 47,21 0 3 2,32 0 0 30,21 0 1 172818434,6 0 0 2,6 0 0 0"
# A frame of more than 1000 bytes to 10.77.0.2.
NO_LARGE_TO_NODE1 = "6,32 0 0 30,21 0 3 172818434,128 0 0 0,37 0 1 1000,6 0 0 2,6 0 0 0"
# A library for all processes of a host: its real-time clock is 40 s ahead, a thread has used 1.5 times the
# processor time.
SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(id, at);
    if (AHEAD && id == CLOCK_REALTIME) at->tv_sec += 40;
    if (SLOW && id == CLOCK_THREAD_CPUTIME_ID) {
        long long time = (at->tv_sec * 1000000000LL + at->tv_nsec) * 3 / 2;
        at->tv_sec = time / 1000000000LL;
        at->tv_nsec = time % 1000000000LL;
    }
    return code;
}
"""

Inject = Callable[[Cluster], AbstractContextManager[object]]


@dataclass(frozen=True)
class Fault:
    """A fault, and the line that names it: "check status fact → mend", a pattern.

    also: patterns of what follows from it, which is no false alarm.
    names: the hosts of the job.
    """

    name: str
    says: str
    inject: Inject
    also: tuple[str, ...] = ()
    names: str = NAMES


# What cannot be tried where the preflight, the versions or the network fail.
UNTRIED = ("job unknown not run: ",)


@contextmanager
def prepared() -> Iterator[Cluster]:
    """Hosts with folders of their own, an environment under a path of its own, and one GPU each."""
    with cluster.up(HOSTS) as standing:
        for host in standing.hosts:
            shell(host, f"mkdir -p {WORK}/runs {WORK}/data /run/env /run/tools")
            shell(host, f"ln -s {BIN.parent}/* /run/env; rm /run/env/bin; mkdir /run/env/bin")
            shell(host, f"ln -s {BIN}/* /run/env/bin; echo 1 >{WORK}/data/file")
            shell(host, f"echo 'print(1)' >{WORK}/train.py; echo 'X = 1' >{WORK}/model.py")
            write_gpu_tool(host)
        yield standing


def doctor(
    hosts: Cluster, *arguments: str, names: str = NAMES, hostfile: str | None = None
) -> tuple[int, float, list[str]]:
    """`mpiddp doctor` on node0: exit code, seconds, and its lines that are not ok, as in `Fault.says`."""
    where = ["-H", names] if hostfile is None else ["--hostfile", hostfile]
    command = [PYTHON, "-m", "mpiddp", "doctor", *where, "--json", *arguments]
    env = {"PATH": f"/run/tools:{ROOT_PATH}"}
    done = hosts["node0"].run(command, cwd=WORK, env=env, timeout_s=2 * PATIENCE_S)
    assert done.stderr == ""
    result: dict[str, Any] = json.loads(done.stdout)
    lines = result["lines"]
    said = [f"{line['check']} {line['status']} {line['fact']} → {line['fix']}" for line in lines]
    wrong = [line for line, each in zip(said, lines, strict=True) if each["status"] != "ok"]
    return done.returncode, result["seconds"], wrong


def unexplained(said: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The lines that no pattern matches."""
    return [line for line in said if not any(re.match(pattern, line) for pattern in patterns)]


def shell(host: Host, script: str, stdin: str | None = None) -> None:
    host.run(["sh", "-ec", script], stdin=stdin, check=True)


def write_gpu_tool(
    host: Host, count: int = 1, driver: str = "570.1", errors: str = "0", users: str = ":"
) -> None:
    numbers = " ".join(map(str, range(count)))
    text = GPU_TOOL.format(numbers=numbers, driver=driver, errors=errors, users=users)
    shell(host, "cat >/run/tools/nvidia-smi; chmod +x /run/tools/nvidia-smi", text)


# --- faults, until the end of a block ---


@contextmanager
def gpu_tool(host: Host, **changes: Any) -> Iterator[None]:
    write_gpu_tool(host, **changes)
    try:
        yield
    finally:
        write_gpu_tool(host)


@contextmanager
def renamed(host: Host, path: str) -> Iterator[None]:
    shell(host, f"mv {path} {path}.away")
    try:
        yield
    finally:
        shell(host, f"rm -rf {path}; mv {path}.away {path}")


@contextmanager
def written(host: Host, path: str, change: Callable[[str], str]) -> Iterator[None]:
    file = host.path(path)
    before = file.read_text() if file.exists() else None
    file.write_text(change(before or ""))
    try:
        yield
    finally:
        if before is None:
            file.unlink()
        else:
            file.write_text(before)


@contextmanager
def mounted(host: Host, path: str, options: str, what: str = "-t tmpfs none") -> Iterator[None]:
    shell(host, f"mount {options} {what} {path}")
    try:
        yield
    finally:
        shell(host, f"umount {path}")


@contextmanager
def other_mpi(host: Host) -> Iterator[None]:
    program = "/run/env/bin/mpirun"
    with renamed(host, program):
        stub = "#!/bin/sh\necho 'mpirun (Open MPI) 4.1.8'\n"
        shell(host, f"cat >{program}; chmod +x {program}", stub)
        yield


@contextmanager
def other_python(host: Host, version: str = "", **packages: str) -> Iterator[None]:
    """An interpreter that finds these packages first, each with this text; mpiddp has one more line."""
    for name, text in packages.items():
        shell(host, f"mkdir -p /run/other/{name}")
        if name == "mpiddp":
            shell(host, f"cp -r {ROOT}/mpiddp /run/other/; echo >>/run/other/mpiddp/text.py")
        elif text:
            shell(host, f"cat >/run/other/{name}/__init__.py", text)
        if version:
            metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            info = f"/run/other/{name}-{version}.dist-info"
            shell(host, f"mkdir -p {info}; cat >{info}/METADATA", metadata)
    wrapper = f'#!/bin/sh\nPYTHONPATH=/run/other exec {sys.executable} "$@"\n'
    shell(host, f"rm {PYTHON}; cat >{PYTHON}; chmod +x {PYTHON}", wrapper)
    try:
        yield
    finally:
        shell(host, f"rm -rf /run/other {PYTHON}; ln -s {BIN}/python {PYTHON}")


@contextmanager
def shimmed(host: Host, *, ahead: bool = False, slow: bool = False) -> Iterator[None]:
    """A host whose clock or processor is another, see SHIM. Only programs that start now see it."""
    library = "/run/shim.so"
    settings = {"AHEAD": ahead, "SLOW": slow}
    flags = [f"-D{name}={int(value)}" for name, value in settings.items()]
    compiler = ["gcc", "-shared", "-fPIC", *flags, "-x", "c", "-", "-o", library]
    host.run(compiler, stdin=SHIM, check=True)
    try:
        with written(host, "/etc/ld.so.preload", lambda text: f"{library}\n"):
            yield
    finally:
        host.path("/etc/ld.so.preload").unlink(missing_ok=True)


@contextmanager
def limited(host: Host, kind: str, value: int) -> Iterator[None]:
    """A limit of sshd, and so of all that it starts."""
    sshd = host.path("/run/sshd.pid").read_text().strip()
    shell(host, f"prlimit --pid={sshd} --{kind}={value}:{value}")
    try:
        yield
    finally:  # only a new process may have more
        ssh.stop_sshd(host)
        ssh.start_sshd([host])


@contextmanager
def one_core(host: Host) -> Iterator[None]:
    sshd = host.path("/run/sshd.pid").read_text().strip()
    before = host.run(["taskset", "-cp", sshd], check=True).stdout.rpartition(": ")[2].strip()
    shell(host, f"taskset -cp 0 {sshd}")
    try:
        yield
    finally:
        shell(host, f"taskset -cp {before} {sshd}")


def tc(host: Host, command: str) -> None:
    enter = [needs.tool("nsenter"), f"--target={host.pid}", "--net", needs.tool("tc")]
    subprocess.run([*enter, *shlex.split(command)], check=True, timeout=PATIENCE_S)


@contextmanager
def filtered(host: Host, program: str) -> Iterator[None]:
    tc(host, "qdisc add dev eth0 clsact")
    try:
        tc(host, f"filter add dev eth0 egress bpf da bytecode '{program}'")
        yield
    finally:
        tc(host, "qdisc del dev eth0 clsact")


@contextmanager
def changed(hosts: Sequence[Host], do: str, undo: str) -> Iterator[None]:
    """Run a shell command on each; {number} is that of the host, from 1."""
    for number, host in enumerate(hosts, start=1):
        shell(host, do.format(number=number))
    try:
        yield
    finally:
        for host in hosts:
            shell(host, undo)


@contextmanager
def foreign_libmpi(host: Host) -> Iterator[None]:
    """The library of mpi4py is that of Open MPI 4 at the path of Open MPI 5."""
    (own,) = BIN.parent.glob("lib/libmpi.so.40")
    (other,) = (ROOT / ".mpi" / "openmpi4").rglob("libmpi.so.40")
    with mounted(host, str(own.resolve()), "--bind", str(other.resolve())):
        yield


def on(
    name: str, inject: Callable[..., AbstractContextManager[object]], *args: Any, **more: Any
) -> Inject:
    """The fault on one host."""
    return lambda hosts: inject(hosts[name], *args, **more)


def _in_etc_hosts(name: str, before: str, after: str) -> Inject:
    return on(name, written, "/etc/hosts", lambda text: text.replace(before, after))


LIST = (
    Fault(
        "wrong key",
        r"preflight fail ssh node1: permission denied \(publickey\) → Run: ssh-copy-id node1",
        on("node1", faults.key_refused),
    ),
    Fault(
        "unknown host key",
        "preflight fail ssh node2: its host key is unknown → .*ssh-keyscan node2",
        lambda hosts: faults.unknown_key(hosts, hosts["node2"]),
    ),
    Fault(
        "stopped sshd",
        "preflight fail ssh node3: connection refused → Start sshd there",
        on("node3", faults.no_sshd),
    ),
    Fault(
        "unresolvable name",
        "preflight fail nowhere: cannot be resolved from node0 → Add it to DNS",
        lambda hosts: ExitStack(),
        names=f"{NAMES},nowhere",
    ),
    Fault(
        "interpreter missing",
        f"preflight fail node1: {PYTHON} is missing → Install it",
        on("node1", renamed, PYTHON),
        also=("stack unknown node1: ",),
    ),
    Fault(
        "daemon missing",
        "preflight fail node2: /run/env/bin/prted is missing or does not run → Install",
        on("node2", renamed, "/run/env/bin/prted"),
    ),
    Fault(
        "host down",
        "preflight fail ssh node3: no (answer in|route from) .* → Check",
        on("node3", faults.unreachable),
    ),
    Fault(
        "working folder missing",
        f"preflight fail node1: the working folder {WORK} is missing",
        on("node1", renamed, WORK),
        also=("files fail .* missing on node1", f"folders fail .* {WORK}.* on node1"),
    ),
    Fault(
        "Open MPI 4 beside 5",
        r"versions fail .*mpirun differs: .*4\.1\.8 on node2 → Install the same MPI",
        on("node2", other_mpi),
    ),
    Fault(
        "own name is 127.0.1.1",
        "names warn node1's own name resolves to 127.0.1.1 there",
        _in_etc_hosts("node1", "10.77.0.2 node1", "127.0.1.1 node1"),
    ),
    Fault(
        "name unknown on one host",
        "names warn node2 cannot be resolved from node1 → add node2 to DNS",
        _in_etc_hosts("node1", "10.77.0.3 node2\n", ""),
    ),
    Fault(
        "name leads elsewhere",
        "names warn node3 resolves to 10.77.0.99 on node2, which is no address of node3",
        _in_etc_hosts("node2", "10.77.0.4", "10.77.0.99"),
    ),
    Fault(
        "banner in a start-up file",
        'ssh warn the start-up files .* on node2 print "Welcome"',
        on("node2", written, "/root/.bashrc", lambda text: "echo Welcome\n"),
    ),
    Fault(
        "another torch",
        r"versions fail torch differs: .*2\.12\.1 on node1 → Install the same version",
        on("node1", other_python, "2.12.1", torch="raise ImportError('no libcudart')"),
        also=("versions fail torch does not load on node1",),
    ),
    Fault(
        "torch does not load",
        "versions fail torch does not load on node1: no libcudart",
        on("node1", other_python, torch="raise ImportError('no libcudart')"),
        also=("versions fail torch (differs|is)", "job fail exit code 1: "),
    ),
    Fault(
        "mpi4py does not load",
        "versions fail mpi4py does not load on node3: no libmpi",
        on("node3", other_python, mpi4py="raise ImportError('no libmpi')"),
        also=("versions fail mpi4py (differs|is)",),
    ),
    Fault(
        "another mpiddp",
        "versions fail mpiddp is [0-9a-f]+ on node3, [0-9a-f]+ on the other 3 hosts",
        on("node3", other_python, mpiddp=""),
    ),
    Fault(
        "foreign libmpi",
        "versions (fail|warn) (mpi4py('s MPI)?|libmpi) .*on node2",
        on("node2", foreign_libmpi),
        also=("versions (fail|warn) .*node2",),
    ),
    Fault(
        "another driver",
        r"GPUs fail driver_version of the GPUs is 535\.2 on node1, 570\.1 on the other 3",
        on("node1", gpu_tool, driver="535.2"),
    ),
    Fault(
        "memory errors of a GPU",
        "GPUs fail uncorrected memory errors on node2: GPU 0: 3",
        on("node2", gpu_tool, errors="3"),
    ),
    Fault(
        "another user of a GPU",
        r"GPUs warn the GPUs of node0 are in use \(pid, MiB\): 4711, 90000",
        on("node0", gpu_tool, users="echo 4711, 90000"),
    ),
    Fault(
        "another number of GPUs",
        "GPUs fail the number of GPUs is 2 on node3, 1 on the other 3 hosts",
        on("node3", gpu_tool, count=2),
    ),
    Fault(
        "script changed",
        f"files fail {WORK}/train.py is [0-9a-f]+ on node2, [0-9a-f]+ on the other 3",
        on("node2", written, f"{WORK}/train.py", lambda text: "print(2)\n"),
    ),
    Fault(
        "module missing",
        f"files fail {WORK}/model.py is missing on node1",
        on("node1", renamed, f"{WORK}/model.py"),
    ),
    Fault(
        "data missing",
        f"folders fail the data folder {WORK}/data cannot be used on node2: No such file",
        on("node2", renamed, f"{WORK}/data"),
    ),
    Fault(
        "run folder read-only",
        f"folders fail the run folder {WORK}/runs cannot be used on node1: Read-only",
        on("node1", mounted, f"{WORK}/runs", "-o ro,size=9g"),
    ),
    Fault(
        "run folder nearly full",
        f"folders fail the run folder {WORK}/runs has .* MB left on node2",
        on("node2", mounted, f"{WORK}/runs", "-o size=50m"),
    ),
    Fault(
        "port blocked one way",
        r"network fail node2 → node1 \(10.77.0.2\) fails: no answer in 3 s; node1 → node2 is open",
        on("node2", filtered, NO_SYN_TO_NODE1),
    ),
    Fault(
        "large packets lost",
        r"network fail node2 → node1 carries small messages but no large ones \(no answer in 3 s\)",
        on("node2", filtered, NO_LARGE_TO_NODE1),
    ),
    Fault(
        "blackholed route",
        "network fail (node3 → node2 .*: no route|node2 → node3 .*: no answer)",
        lambda hosts: changed(
            [hosts["node3"]],
            "ip route add blackhole 10.77.0.3/32",
            "ip route del blackhole 10.77.0.3/32",
        ),
    ),
    Fault(
        "small MTU",
        "network warn the MTU is 1400 on node3, 1500 on the other 3 hosts",
        lambda hosts: changed(
            [hosts["node3"]], "ip link set dev eth0 mtu 1400", "ip link set dev eth0 mtu 1500"
        ),
    ),
    Fault(
        "slow processor",
        r"speed warn node1 is slow: \d+ % of the others' speed",
        on("node1", shimmed, slow=True),
        also=("speed warn node1 is slow: ",),
    ),
    Fault(
        "skewed clock",
        "clock warn the clock of node3 is .* s ahead",
        on("node3", shimmed, ahead=True),
    ),
    Fault(
        "low nofile",
        "limits fail a process may open 256 files on node3 ",
        on("node3", limited, "nofile", 256),
    ),
    Fault(
        "low memlock",
        "limits warn the limit of locked memory is 65536 on node1, .* on the other 3",
        on("node1", limited, "memlock", 65536),
    ),
    Fault(
        "one core only",
        "limits warn the number of cores for a process is 1 on node2",
        on("node2", one_core),
    ),
    Fault(
        "small /dev/shm",
        "limits warn /dev/shm holds 16.8 MB on node3 → mount -o remount",
        on("node3", mounted, "/dev/shm", "-o size=16m"),
    ),
)
FAULTS: Mapping[str, Fault] = {fault.name: fault for fault in LIST}
