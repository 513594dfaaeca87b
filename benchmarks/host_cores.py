"""Small hosts of the test cluster: all processes of a host share so many cores, until the end of a block.

with host_cores.limited(cluster["node0"], 0.4):
    cluster["node0"].run(host_cores.within(cluster["node0"], ["python", "train.py"]))

The kernel's cpu controller (of cgroup v1) stops the processes of a host for the rest of each 10 ms, once they
have used their share.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.cluster.host import Arg, Host

_CPU = Path("/sys/fs/cgroup/cpu")
_PERIOD_US = 10_000
_SHARES = 4 * 1024  # of four processes: beside others, a group counts as one unless it has more
_JOIN = 'echo 0 > "$0" && exec "$@"'  # 0 is the process that writes


def why_not() -> str | None:
    """The reason why this machine cannot limit a host, in one sentence, or None."""
    if not (_CPU / "cpu.cfs_quota_us").exists():
        return f"hosts with a share of the cores need the cpu controller of cgroup v1 in {_CPU}"
    return None


@contextmanager
def limited(host: Host, cores: float) -> Iterator[None]:
    """Limit the processes of the host, and those that they start. See `within` for others."""
    group = _group(host)
    group.mkdir(exist_ok=True)  # left by a killed process, and without processes
    namespace = Path(f"/proc/{host.pid}/ns/pid").readlink()
    try:
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                if (entry / "ns/pid").readlink() == namespace:
                    (group / "cgroup.procs").write_text(entry.name)
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(round(cores * _PERIOD_US)))
        (group / "cpu.shares").write_text(str(_SHARES))
        yield
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):  # it has ended
                (_CPU / "cgroup.procs").write_text(pid)
        group.rmdir()


def within(host: Host, argv: Sequence[Arg]) -> list[Arg]:
    """A command of `host.run`, under the limit of the host: this machine starts it, not the host."""
    return ["sh", "-c", _JOIN, _group(host) / "cgroup.procs", *argv]


def _group(host: Host) -> Path:
    return _CPU / f"mpiddp-host-{host.pid}"
