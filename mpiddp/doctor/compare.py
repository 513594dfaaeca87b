"""From what the hosts say of themselves to lines: pure functions of a value for each host's name.

What differs is named against the majority; a value that cannot be read is "unknown", never "ok".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from ipaddress import ip_address
from statistics import mean, median, median_low, stdev
from typing import Any

from mpiddp.doctor.report import FAIL, OK, UNKNOWN, WARN, Found, Line, lines
from mpiddp.launch.preflight import by_value
from mpiddp.text import all_of, counted, listed, names_by_value, shown, size_text

Facts = Mapping[str, Mapping[str, Any]]
Speeds = Mapping[
    str, Mapping[str, float]
]  # of each host's name: what was measured, the more the better

LEAST_FILES = 1024  # open files of a rank: it has sockets to all others, and its loader's pipes
LEAST_SHM = 512e6  # Docker's 64 MB do not hold the batches of a few workers
LEAST_FREE, LITTLE_FREE = 100e6, 2e9  # bytes of a folder of runs: no checkpoint, few checkpoints
MOST_SKEW_S = 2.0
TOLERANCE = 0.10  # of the median, and one deviation of the others
NOISY_TOLERANCE = 0.50  # two writes to the same disk differ by more than 10 %
GLOO = "(gloo)"
_NOISY = ("disk", "link", GLOO)  # gloo shares the cores with whatever else runs
_MOST_LOAD = 0.5  # of the cores, before the doctor's own work
LEAST_COMPARED = 3  # hosts: of two, either may be the odd one
_PUSH = "copy it again: mpiddp hosts push"


def differences(what: str, values: Mapping[str, Any]) -> str:
    """ "torch is 2.12.1 on node2, 2.13.0 on the other 15 hosts"; "" if all are equal."""
    texts = {name: str(value) for name, value in values.items()}
    groups = names_by_value(texts)
    most = max(map(len, groups.values()), default=0)
    if len(groups) < 2:
        return ""
    if 2 * most <= len(values):  # no majority
        return f"{what} differs: {by_value(texts)}"
    odd = [f"{value} on {all_of(names)}" for value, names in groups.items() if len(names) < most]
    (usual,) = [value for value, names in groups.items() if len(names) == most]
    return f"{what} is {', '.join(odd)}, {usual} on the other {counted(most, 'host')}"


def shells(greetings: Mapping[str, str]) -> list[Line]:
    """Whether the shell of each host starts without output, which other programs over ssh cannot bear."""
    printed = {name: text.strip().partition("\n")[0] for name, text in greetings.items()}
    mend = "print only in interactive shells: begin ~/.bashrc there with [[ $- == *i* ]] || return"
    found = [
        (WARN, f'the start-up files of the shell on {name} print "{shown(text)}"', mend)
        for name, text in printed.items()
        if text
    ]
    return lines("ssh", found, "every host runs python3 from a shell that is not interactive")


def names(facts: Facts) -> list[Line]:
    """Whether every host resolves every other name to an address of that host, and its own to a real one."""
    return lines("names", _names(facts), "every host resolves every name to the same host")


def _names(facts: Facts) -> Iterator[Found]:
    for name, named in facts.items():
        answers = {here: found["names"].get(name, []) for here, found in facts.items()}
        if unresolved := [here for here, addresses in answers.items() if not addresses]:
            mend = f"add {name} to DNS, or to /etc/hosts there"
            yield WARN, f"{name} cannot be resolved from {all_of(unresolved)}", mend
        for here, addresses in answers.items():
            if here != name and addresses and not {*addresses} & {*named["addresses"]}:
                fact = f"{name} resolves to {all_of(addresses)} on {here}, which is no address of {name}"
                yield WARN, fact, f"correct {name} in DNS or in /etc/hosts of {here}"
        own = [each.partition("%")[0] for each in named["names"].get(named["hostname"], [])]
        if len(facts) > 1 and (loops := [each for each in own if ip_address(each).is_loopback]):
            fact = f"{name}'s own name resolves to {loops[0]} there, which no other host can reach"
            yield WARN, fact, f"give it its real address in /etc/hosts of {name}"


def stacks(found: Mapping[str, Mapping[str, str]], already: Sequence[str] = ()) -> list[Line]:
    """Whether the interpreter of the ranks loads the same on all hosts. `already`: what was compared."""
    same = {f"{what} {value}" for each in found.values() for what, value in each.items()}
    same = {each for each in same if each.startswith(("python ", "torch ", "mpi4py "))}
    well = f"the same on every host: {', '.join(sorted(same))}"
    return lines("versions", _stacks(found, already), well)


def _stacks(found: Mapping[str, Mapping[str, str]], already: Sequence[str]) -> Iterator[Found]:
    for what in dict.fromkeys(what for each in found.values() for what in each):
        # A package that is missing or broken on a host tells nothing of its library there.
        values = {name: each[what] for name, each in found.items() if what in each}
        broken = {name: value for name, value in values.items() if value.startswith("broken: ")}
        for name, value in broken.items():
            fact = f"{what} does not load on {name}: {value.removeprefix('broken: ')}"
            yield FAIL, fact, f"install {what} there as on the other hosts"
        values = {name: value for name, value in values.items() if name not in broken}
        if what not in already and (fact := differences(what, values)):
            mend = "install the same version on every host, or copy it: mpiddp hosts push"
            yield WARN if what.startswith("lib") else FAIL, fact, mend
        elif {*values.values()} == {"missing"}:
            yield WARN, f"{what} is missing on every host", ""


def gpus(facts: Facts) -> list[Line]:
    """GPUs of NVIDIA: count, model, memory, driver, clocks; who uses them; errors of memory and Xids."""
    if all(found["gpus"] == {} for found in facts.values()):
        return [Line("GPUs", OK, "no host has nvidia-smi")]
    return lines("GPUs", _gpus(facts), "the same on every host, unused and without errors")


def _gpus(facts: Facts) -> Iterator[Found]:
    known = {name: found["gpus"] for name, found in facts.items() if found["gpus"] is not None}
    for name in facts.keys() - known.keys():
        yield FAIL, f"nvidia-smi does not answer on {name}", "repair the driver there"
    each = {name: found.get("each", []) for name, found in known.items()}
    if fact := differences("the number of GPUs", {name: len(rows) for name, rows in each.items()}):
        yield FAIL, fact, "see nvidia-smi and dmesg there: a GPU may have fallen off the bus"
    each = {name: rows for name, rows in each.items() if rows}
    for field in ("name", "memory.total", "driver_version", "clocks.max.sm"):
        values = {name: all_of(sorted({row[field] for row in rows})) for name, rows in each.items()}
        if fact := differences(f"{field} of the GPUs", values):
            is_driver = field == "driver_version"
            yield FAIL if is_driver else WARN, fact, "install the same driver" if is_driver else ""
    for name, rows in each.items():
        if users := known[name]["users"]:
            fact = f"the GPUs of {name} are in use (pid, MiB): {listed(users, most=4)}"
            yield WARN, fact, "wait for these processes, or end them there"
        errors = {row["index"]: row["ecc.errors.uncorrected.volatile.total"] for row in rows}
        if bad := [f"GPU {index}: {n}" for index, n in errors.items() if n.isdigit() and int(n)]:
            fact = f"uncorrected memory errors on {name}: {listed(bad)}"
            yield FAIL, fact, "reset or replace the GPU"
        if not all(count.isdigit() for count in errors.values()):
            yield UNKNOWN, f"a GPU of {name} does not count errors of its memory (ECC)", ""
        if xids := known[name]["xids"]:
            yield WARN, f"the kernel's log on {name} has {xids[-1]}", "see NVIDIA's list of Xids"
        elif xids is None:
            yield UNKNOWN, f"the kernel's log on {name} may not be read, so no Xid was sought", ""


def processes(facts: Facts, where: str) -> list[Line]:
    """Limits, cores and shared memory of a process on each host. `where` says what kind of process."""
    well = f"cores, ulimit and /dev/shm suffice ({where})"
    return lines("limits", _processes(facts, where), well)


def _processes(facts: Facts, where: str) -> Iterator[Found]:
    for kind in ("open files", "locked memory", "processes"):
        values = {name: found["limits"][kind] for name, found in facts.items()}
        if kind == "open files":
            few = {name: count for name, count in values.items() if 0 <= count < LEAST_FILES}
            for name in few:
                mend = f"raise nofile to {LEAST_FILES} or more there, for sshd too"
                yield FAIL, f"a process may open {values.pop(name)} files on {name} ({where})", mend
        texts = {name: "unlimited" if n == -1 else str(n) for name, n in values.items()}
        if fact := differences(f"the limit of {kind}", texts):
            yield WARN, f"{fact} ({where})", "set it alike in /etc/security/limits.conf"
    for name, found in facts.items():
        if found["infiniband"] and found["limits"]["locked memory"] != -1:
            fact = f"locked memory is limited on {name}, which InfiniBand needs ({where})"
            yield FAIL, fact, "set memlock to unlimited there, for sshd too"
        if found["shm"]["total"] < LEAST_SHM:
            fact = f"/dev/shm holds {size_text(found['shm']['total'])} on {name}"
            yield WARN, fact, "mount -o remount,size=8G /dev/shm there; in Docker: --shm-size 8g"
    for what in ("cores", "cores for a process"):
        if fact := differences(f"the number of {what}", {n: f[what] for n, f in facts.items()}):
            yield WARN, f"{fact} ({where})", ""


def folders(facts: Facts, marks: Mapping[str, int]) -> list[Line]:
    """Whether each folder can be used. `marks`: of how many hosts each sees one in the folder of runs."""
    is_shared = {*marks.values()} == {len(marks)}
    runs = f"; runs are {'' if is_shared else 'not '}shared" if len(marks) > 1 else ""
    return lines("folders", _folders(facts), f"present, readable and with space{runs}")


def _folders(facts: Facts) -> Iterator[Found]:
    for label in dict.fromkeys(label for found in facts.values() for label in found["folders"]):
        values = {name: found["folders"][label] for name, found in facts.items()}
        has = [name for name, each in values.items() if not each["error"]]
        for name, folder in values.items():
            path = folder["path"]
            if folder["error"]:
                fact = f"the {label} folder {path} cannot be used on {name}: {folder['error']}"
                others = f"; {all_of(has)} can" if has else ""
                yield FAIL, fact + others, f"copy or mount it there, or allow it: ls -ld {path}"
            elif folder["keeps"] and folder["free"] < LITTLE_FREE:
                fact = f"the {label} folder {path} has {size_text(folder['free'])} left on {name}"
                status = FAIL if folder["free"] < LEAST_FREE else WARN
                yield status, fact, f"free space there: df -h {path}"
        entries = {name: values[name]["entries"] for name in has}
        if fact := differences(f"the list of files in the {label} folder", entries):
            yield FAIL, fact, "copy it again"


def files(facts: Facts) -> list[Line]:
    """Whether the files of the job are the same, by their SHA-256."""
    paths = list(dict.fromkeys(path for found in facts.values() for path in found["files"]))
    well = f"{counted(len(paths), 'file')} of the script, the same on every host"
    rows = [(FAIL, fact, _PUSH) for path in paths for fact in _file(facts, path)]
    return lines("files", rows, well)


def _file(facts: Facts, path: str) -> Iterator[str]:
    """What is wrong with one of the files."""
    each = {name: found["files"][path] for name, found in facts.items()}
    errors = {name: file["error"] for name, file in each.items() if file["error"]}
    for error, hosts in names_by_value(errors).items():
        yield f"{path} {error} on {all_of(hosts)}"
    hashes = {name: file["hash"] for name, file in each.items() if not file["error"]}
    if fact := differences(path, hashes):
        yield fact


def clocks(skews: Mapping[str, float]) -> list[Line]:
    """Whether the clocks agree; if not, which differ from that of most hosts."""
    return lines("clock", _clocks(skews), f"all within {MOST_SKEW_S:g} s")


def _clocks(skews: Mapping[str, float]) -> Iterator[Found]:
    in_order = sorted(skews, key=lambda name: skews[name])
    apart = skews[in_order[-1]] - skews[in_order[0]] if skews else 0.0
    if apart <= MOST_SKEW_S:
        return
    usual = median_low(skews.values())
    off = {name: skew - usual for name, skew in skews.items() if abs(skew - usual) > MOST_SKEW_S}
    if len(skews) < LEAST_COMPARED or not off:
        fact = f"the clocks of {in_order[0]} and {in_order[-1]} are {apart:.1f} s apart"
        yield WARN, fact, "start a time service on both: sudo timedatectl set-ntp true"
        return
    for name, skew in off.items():
        fact = f"the clock of {name} is {abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'}"
        yield WARN, fact, f"start a time service: ssh {name} sudo timedatectl set-ntp true"


def slow_hosts(speeds: Speeds) -> dict[tuple[str, str], float]:
    """(host, what) to its part of the median, where that is low beyond 10 % and one deviation."""
    found = {}
    for what, values in _by_figure(speeds).items():
        least = 1 - (NOISY_TOLERANCE if what.endswith(_NOISY) else TOLERANCE)
        for name, value in values.items():
            others = [value for other, value in values.items() if other != name]
            usual = median(others) if len(others) > 1 else 0.0
            if value < least * usual and value < mean(others) - stdev(others):
                found[name, what] = value / usual
    return found


def speeds(found: Speeds) -> list[Line]:
    """Which hosts are slow at what was measured."""
    measured = _by_figure(found)
    rows: list[Found] = [
        (WARN, f"{name} is slow: {what} at {100 * part:.0f} % of the others'", f"ssh {name} top")
        for (name, what), part in slow_hosts(found).items()
    ]
    if len(found) < LEAST_COMPARED:
        fact = f"{counted(len(found), 'host')} cannot tell which one is slow: {LEAST_COMPARED} can"
        rows.append((UNKNOWN, fact, ""))
    for what, values in measured.items():
        if missing := [name for name in found if name not in values]:
            rows.append((UNKNOWN, f"{what} was not measured on {all_of(missing)}", ""))
    return lines("speed", rows, f"no host is slow at {listed(list(measured))}")


def busy(facts: Facts) -> dict[str, str]:
    """The hosts whose cores other programs use: an all-reduce on their cores tells nothing of them."""
    return {
        name: f"{name} (load {found['load']:.1f} on {counted(found['cores'], 'core')})"
        for name, found in facts.items()
        if found["load"] > _MOST_LOAD * found["cores"]
    }


def unjudged(facts: Facts) -> list[Line]:
    """A line if all-reduces of gloo were not compared."""
    hosts = list(busy(facts).values())
    fact = f"all-reduces of gloo are not compared: other programs run on {listed(hosts, most=3)}"
    return [Line("speed", UNKNOWN, fact)] if hosts else []


def _by_figure(speeds: Speeds) -> dict[str, dict[str, float]]:
    """What was measured, to the figure of each host by its name."""
    return {
        what: {name: each[what] for name, each in speeds.items() if what in each}
        for what in dict.fromkeys(what for each in speeds.values() for what in each)
    }
