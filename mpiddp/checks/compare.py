"""From what the hosts say to lines: pure functions. Each takes a value for each host's name.

What differs is named against the majority; a value that cannot be read is "unknown", never "ok".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from ipaddress import ip_address
from statistics import mean, median, stdev
from typing import Any

from mpiddp.checks.report import FAIL, OK, UNKNOWN, WARN, Line, or_ok
from mpiddp.launch.preflight import by_value
from mpiddp.text import all_of, counted, listed, size_text

Facts = Mapping[str, Mapping[str, Any]]

LEAST_FILES = 1024  # open files of a rank: it has sockets to all others, and its loader's pipes
LEAST_SHM = 512e6  # Docker's 64 MB do not hold the batches of a few workers
LEAST_FREE, LITTLE_FREE = 100e6, 2e9  # bytes of a folder of runs: no checkpoint, few checkpoints
MOST_SKEW_S = 2.0
TOLERANCE = 0.10  # of the median, and one deviation of the others
DISK_TOLERANCE = 0.50  # two writes to the same disk differ by more than 10 %


def differences(what: str, values: Mapping[str, Any]) -> str:
    """ "torch is 2.12.1 on node2, 2.13.0 on the other 15 hosts"; "" if all are equal."""
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        groups.setdefault(str(value), []).append(name)
    most = max(map(len, groups.values()), default=0)
    if len(groups) < 2:
        return ""
    if 2 * most <= len(values):  # no majority
        return f"{what} differs: {by_value({name: str(value) for name, value in values.items()})}"
    odd = [f"{value} on {all_of(names)}" for value, names in groups.items() if len(names) < most]
    (usual,) = [value for value, names in groups.items() if len(names) == most]
    return f"{what} is {', '.join(odd)}, {usual} on the other {counted(most, 'host')}"


def names(facts: Facts, hosts: Sequence[str]) -> list[Line]:
    """Whether every host resolves every other name to an address of that host, and its own to a real one."""
    return or_ok("names", _names(facts, hosts), "every host resolves every name to the same host")


def _names(facts: Facts, hosts: Sequence[str]) -> Iterator[Line]:
    for here, found in facts.items():
        for name in hosts:
            addresses = found["names"].get(name, [])
            own = facts[name]["addresses"] if name in facts else None
            if not addresses:
                mend = f"add {name} to DNS, or to /etc/hosts of {here}"
                yield Line("names", WARN, f"{name} cannot be resolved from {here}", mend)
            elif name != here and own and not set(addresses) & {*own}:
                yield Line(
                    "names",
                    WARN,
                    f"{name} resolves to {all_of(addresses)} on {here}, which is no address of {name}",
                    f"correct {name} in DNS or in /etc/hosts of {here}",
                )
        loops = [each for each in found["names"].get(found["hostname"], []) if _is_loopback(each)]
        if loops and len(facts) > 1:
            yield Line(
                "names",
                WARN,
                f"{here}'s own name resolves to {loops[0]} there, which no other host can reach",
                f"give it its real address in /etc/hosts of {here}; mpiddp itself does not need it",
            )


def _is_loopback(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_loopback


def stacks(found: Mapping[str, Mapping[str, str]], already: Sequence[str] = ()) -> list[Line]:
    """Whether the interpreter of the ranks loads the same on all hosts. `already`: what was compared."""
    lines = []
    everything = sorted({what for each in found.values() for what in each})
    for what in everything:
        values = {name: each.get(what, "missing") for name, each in found.items()}
        broken = {name: value for name, value in values.items() if value.startswith("broken: ")}
        for name, value in broken.items():
            fact = f"{what} does not load on {name}: {value.removeprefix('broken: ')}"
            lines.append(
                Line("versions", FAIL, fact, f"install {what} there as on the other hosts")
            )
        values = {name: value for name, value in values.items() if name not in broken}
        lacks_torch = {name for name, each in found.items() if not _loads(each, what)}
        values = {name: value for name, value in values.items() if name not in lacks_torch}
        if what not in already and (fact := differences(what, values)):
            status = WARN if what.startswith("lib") else FAIL
            mend = "install the same version on every host, or copy it: mpiddp hosts push"
            lines.append(Line("versions", status, fact, mend))
        if values and set(values.values()) == {"missing"}:
            lines.append(Line("versions", WARN, f"{what} is missing on every host", ""))
    same = {f"{what} {value}" for each in found.values() for what, value in each.items()}
    shown = [each for each in sorted(same) if each.startswith(("python ", "torch ", "mpi4py "))]
    return or_ok("versions", lines, f"the same on every host: {', '.join(shown)}")


def _loads(stack: Mapping[str, str], what: str) -> bool:
    """Whether a value of this package could be read at all: one that does not load has its own line."""
    package = {"libmpi": "mpi4py", "mpi4py's MPI": "mpi4py"}.get(what, "torch")
    if what in ("python", "mpiddp", "torch", "mpi4py"):
        return True
    return not stack.get(package, "missing").startswith(("broken: ", "missing"))


def gpus(facts: Facts) -> list[Line]:
    """GPUs of NVIDIA: count, model, memory, driver, clocks; who uses them; errors of memory and Xids."""
    if all(found["gpus"] == {} for found in facts.values()):
        return [Line("GPUs", OK, "no host has nvidia-smi")]
    return or_ok("GPUs", _gpus(facts), "the same on every host, unused and without errors")


def _gpus(facts: Facts) -> Iterator[Line]:
    known = {name: found["gpus"] for name, found in facts.items() if found["gpus"] is not None}
    for name in facts.keys() - known.keys():
        yield Line("GPUs", FAIL, f"nvidia-smi does not answer on {name}", "repair the driver there")
    each = {name: found.get("each", []) for name, found in known.items()}
    if fact := differences("the number of GPUs", {name: len(rows) for name, rows in each.items()}):
        yield Line(
            "GPUs", FAIL, fact, "see nvidia-smi and dmesg there: a GPU may have fallen off the bus"
        )
    for field in ("name", "memory.total", "driver_version", "clocks.max.sm"):
        values = {
            name: " and ".join(sorted({row[field] for row in rows})) for name, rows in each.items()
        }
        if fact := differences(f"{field} of the GPUs", {n: v for n, v in values.items() if v}):
            status = FAIL if field == "driver_version" else WARN
            yield Line("GPUs", status, fact, "install the same driver" if status == FAIL else "")
    for name, rows in each.items():
        if users := known[name].get("users"):
            yield Line(
                "GPUs",
                WARN,
                f"{counted(len(users), 'process')[:-1] + 'es' if len(users) > 1 else '1 process'} "
                f"on the GPUs of {name} (pid, MiB): {listed(users, most=4)}",
                "wait for them, or end them there",
            )
        errors = {row["index"]: row["ecc.errors.uncorrected.volatile.total"] for row in rows}
        bad = [f"GPU {index}: {count}" for index, count in errors.items() if count not in ("0",)]
        counted_bad = [each for each in bad if each.rpartition(" ")[2].isdigit()]
        if counted_bad:
            fact = f"uncorrected memory errors on {name}: {listed(counted_bad)}"
            yield Line("GPUs", FAIL, fact, "reset or replace the GPU")
        elif bad:
            yield Line("GPUs", UNKNOWN, f"{name} does not count errors of GPU memory (ECC)")
        if xids := known[name].get("xids"):
            yield Line(
                "GPUs",
                WARN,
                f"the kernel's log on {name} has {xids[-1]}",
                "see NVIDIA's list of Xids",
            )
        elif rows and known[name].get("xids") is None:
            yield Line(
                "GPUs", UNKNOWN, f"the kernel's log on {name} may not be read, so no Xid was sought"
            )


def processes(facts: Facts, where: str) -> list[Line]:
    """Limits, cores and shared memory of a process on each host. `where` says what kind of process."""
    return or_ok(
        "limits", _processes(facts, where), f"cores, ulimit and /dev/shm suffice ({where})"
    )


def _processes(facts: Facts, where: str) -> Iterator[Line]:
    for kind in ("open files", "locked memory", "processes"):
        values = {name: found["limits"][kind] for name, found in facts.items()}
        few = [
            name
            for name, value in values.items()
            if kind == "open files" and 0 <= value < LEAST_FILES
        ]
        for name in few:
            fact = f"a process may open {values[name]} files on {name} ({where})"
            yield Line(
                "limits", FAIL, fact, f"raise nofile to {LEAST_FILES} or more there, for sshd too"
            )
        shown = {name: _limit(kind, value) for name, value in values.items() if name not in few}
        if fact := differences(f"the limit of {kind}", shown):
            yield Line(
                "limits", WARN, f"{fact} ({where})", "set it alike in /etc/security/limits.conf"
            )
        locked = [
            name for name, value in values.items() if value != -1 and facts[name]["infiniband"]
        ]
        if kind == "locked memory" and locked:
            fact = f"locked memory is limited on {all_of(locked)}, which InfiniBand needs ({where})"
            yield Line("limits", FAIL, fact, "set memlock to unlimited there, for sshd too")
    for what in ("cores", "affinity"):
        title = (
            "the number of cores"
            if what == "cores"
            else "the number of cores that a process may use"
        )
        if fact := differences(title, {name: found[what] for name, found in facts.items()}):
            yield Line("limits", WARN, f"{fact} ({where})")
    for name, found in facts.items():
        if found["shm"]["total"] < LEAST_SHM:
            yield Line(
                "limits",
                WARN,
                f"/dev/shm holds {size_text(found['shm']['total'])} on {name}",
                "mount -o remount,size=8G /dev/shm there; in Docker: --shm-size 8g",
            )


def _limit(kind: str, value: int) -> str:
    return (
        "unlimited" if value == -1 else size_text(value) if kind == "locked memory" else str(value)
    )


def folders(facts: Facts, marks: Mapping[str, int]) -> list[Line]:
    """Whether each folder can be used. `marks`: of how many hosts each sees one in the folder of runs."""
    lines = list(_folders(facts))
    is_shared = bool(marks) and set(marks.values()) == {len(marks)}
    shared = "the folder of runs is shared" if is_shared else "the folder of runs is not shared"
    return or_ok("folders", lines, f"present, readable and with space; {shared}")


def _folders(facts: Facts) -> Iterator[Line]:
    for label in dict.fromkeys(label for found in facts.values() for label in found["folders"]):
        values = {name: found["folders"][label] for name, found in facts.items()}
        for name, folder in values.items():
            path = folder["path"]
            if folder["error"]:
                has = [other for other, each in values.items() if not each["error"]]
                fact = f"the {label} folder {path} cannot be used on {name}: {folder['error']}"
                others = f"; {all_of(has)} can" if has else ""
                mend = f"copy or mount it there, or allow it: ls -ld {path}"
                yield Line("folders", FAIL, fact + others, mend)
            elif folder["keeps"] and folder["free"] < LITTLE_FREE:
                status = FAIL if folder["free"] < LEAST_FREE else WARN
                fact = f"the {label} folder {path} has {size_text(folder['free'])} left on {name}"
                yield Line("folders", status, fact, f"free space there: df -h {path}")
        entries = {name: each["entries"] for name, each in values.items() if not each["error"]}
        if fact := differences(f"the list of files in the {label} folder", entries):
            yield Line("folders", FAIL, fact, "copy it again")


def files(facts: Facts) -> list[Line]:
    """Whether the files of the job are the same, by their SHA-256."""
    lines = []
    paths = list(dict.fromkeys(path for found in facts.values() for path in found["files"]))
    for path in paths:
        values = {name: found["files"].get(path, "missing") for name, found in facts.items()}
        if fact := differences(path, values):
            lines.append(Line("files", FAIL, fact, "copy it again: mpiddp hosts push"))
    return or_ok(
        "files", lines, f"{counted(len(paths), 'file')} of the script, the same on every host"
    )


def clocks(skews: Mapping[str, float]) -> list[Line]:
    """Whether the clocks agree with that of most hosts."""
    usual = median(skews.values()) if skews else 0.0
    lines = [
        Line(
            "clock",
            WARN,
            f"the clock of {name} is {abs(skew - usual):.1f} s {'ahead' if skew > usual else 'behind'}",
            f"start a time service there: ssh {name} sudo timedatectl set-ntp true",
        )
        for name, skew in skews.items()
        if abs(skew - usual) > MOST_SKEW_S
    ]
    return or_ok("clock", lines, f"all within {MOST_SKEW_S:g} s")


def mtu(facts: Facts, addresses: Mapping[str, str]) -> list[Line]:
    """Whether the interfaces of the job's network have the same MTU."""
    values = {
        name: each["mtu"]
        for name, address in addresses.items()
        for each in facts[name]["interfaces"]
        if each["address"] == address
    }
    mend = "ip link set dev INTERFACE mtu N, alike on the hosts and the switch"
    fact = differences("the MTU", values)
    return or_ok(
        "network", [Line("network", WARN, fact, mend)] if fact else [], f"MTU {_one(values)}"
    )


def _one(values: Mapping[str, int]) -> str:
    return str(next(iter(values.values()), "unknown"))


def reach(found: Mapping[str, Mapping[str, Any]], addresses: Mapping[str, str]) -> list[Line]:
    """Whether each host reaches each other on the job's network, in each direction, with large packets."""
    lines, slowest, pairs = [], 0.0, 0
    failed: dict[str, dict[str, list[str]]] = {}  # by error, by the other host
    for here, answers in found.items():
        for there, answer in answers.items():
            pairs += 1
            slowest = max(slowest, answer["latency_ms"])
            if answer["error"]:
                failed.setdefault(answer["error"], {}).setdefault(there, []).append(here)
            elif answer["large"]:
                fact = (
                    f"{here} → {there} carries small messages but no large ones ({answer['large']})"
                )
                lines.append(
                    Line("network", FAIL, fact, "set the same MTU on the hosts and the switch")
                )
            elif answer["source"] != addresses.get(here):
                fact = f"{here} → {there} takes {answer['source']}, not the job's {addresses.get(here)}"
                lines.append(Line("network", WARN, fact, f"see: ssh {here} ip route"))
    for error, by_target in failed.items():
        for there, sources in by_target.items():
            for here in sources:
                is_open = not found.get(there, {}).get(here, {"error": "-"})["error"]
                way = f"; {there} → {here} is open: a firewall or a route" if is_open else ""
                fact = f"{here} → {there} ({addresses.get(there)}) fails: {error}{way}"
                mend = f"ssh {here} ip route get {addresses.get(there)}; allow TCP from {here} on {there}"
                lines.append(Line("network", FAIL, fact, mend))
    return or_ok(
        "network", lines, f"all {pairs} directions open, slowest round trip {slowest:.2f} ms"
    )


def rates(found: Mapping[tuple[str, str], float | str]) -> list[Line]:
    """The bytes a second of each direction; the slow ones against the others."""
    known = {pair: rate for pair, rate in found.items() if not isinstance(rate, str)}
    lines = [
        Line("bandwidth", UNKNOWN, f"{here} → {there}: {rate}")
        for (here, there), rate in found.items()
        if isinstance(rate, str)
    ]
    if not known:
        return lines
    usual = median(known.values())
    slow = sorted((rate, pair) for pair, rate in known.items() if rate < usual / 2)
    lines += [
        Line(
            "bandwidth",
            WARN,
            f"{here} → {there} carries {size_text(rate)}/s, the middle pair {size_text(usual)}/s",
            f"see the cable and the port: ssh {here} ip -s link, ethtool",
        )
        for rate, (here, there) in slow
    ]
    least, most = (size_text(f(known.values())) for f in (min, max))
    return or_ok("bandwidth", lines, f"{least}/s to {most}/s in each direction")


def slow_hosts(speeds: Mapping[str, Mapping[str, float]]) -> dict[tuple[str, str], float]:
    """(host, what) to its part of the median, where that is low beyond 10 % and one deviation."""
    found = {}
    for what in dict.fromkeys(what for each in speeds.values() for what in each):
        values = {name: each[what] for name, each in speeds.items() if what in each}
        for name, value in values.items():
            others = [value for other, value in values.items() if other != name]
            if len(others) < 2:
                continue
            usual = median(others)
            least = 1 - (DISK_TOLERANCE if what == "disk" else TOLERANCE)
            if value < least * usual and value < mean(others) - stdev(others):
                found[name, what] = value / usual
    return found


def speeds(found: Mapping[tuple[str, str], float]) -> list[Line]:
    """The lines for what `slow_hosts` has found."""
    lines = [
        Line(
            "speed",
            WARN,
            f"{name} is slow: {what} at {100 * part:.0f} % of the others'",
            f"ssh {name} top",
        )
        for (name, what), part in found.items()
    ]
    return or_ok(
        "speed", lines, "matrix product, memory copy and disk within 10 % or one deviation"
    )
