"""What is wrong, from what the hosts say of themselves: pure functions of a value for each host's name.

What differs is named against the majority; a value that cannot be read is "unknown", never "ok". `results`
turns what a function finds into the lines of its check.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from mpiddp.hosts.gpus import Gpu
from mpiddp.hosts.reachability import blocked
from mpiddp.text import all_of, differences, names_by_value, size_text

OK, WARN, FAIL, UNKNOWN = "ok", "warn", "fail", "unknown"
Found = tuple[str, str, str]  # one of the four words, the fact, and what fixes it ("" for nothing)
Facts = Mapping[str, Mapping[str, Any]]

LEAST_FILES = 1024  # open files of a rank: it has sockets to all others, and its loader's pipes
LEAST_SHM = 512e6  # Docker's 64 MB do not hold the batches of a few workers
_PUSH = "copy it again: mpiddp hosts push"


@dataclass(frozen=True)
class Line:
    """One result of a check."""

    check: str
    status: str
    fact: str
    fix: str = ""


def results(check: str, found: Iterable[Found], ok_text: str) -> list[Line]:
    """The lines of a check; `ok_text` is the fact where it has found nothing."""
    return [Line(check, *each) for each in found] or [Line(check, OK, ok_text)]


def names(facts: Facts) -> Iterator[Found]:
    """Whether every host resolves every other name to an address of that host, and its own to a real one."""
    for name, named in facts.items():
        answers = {here: found["names"].get(name, []) for here, found in facts.items()}
        if unresolved := [here for here, addresses in answers.items() if not addresses]:
            fix = f"add {name} to DNS, or to /etc/hosts there"
            yield WARN, f"{name} cannot be resolved from {all_of(unresolved)}", fix
        for here, addresses in answers.items():
            if here != name and addresses and not {*addresses} & {*named["addresses"]}:
                fact = f"{name} resolves to {all_of(addresses)} on {here}, which is no address of {name}"
                yield WARN, fact, f"correct {name} in DNS or in /etc/hosts of {here}"
        own = [each.partition("%")[0] for each in named["names"].get(named["hostname"], [])]
        if len(facts) > 1 and (loops := [each for each in own if ip_address(each).is_loopback]):
            fact = f"{name}'s own name resolves to {loops[0]} there, which no other host can reach"
            yield WARN, fact, f"give it its real address in /etc/hosts of {name}"


def stacks(found: Mapping[str, Mapping[str, str]], already: Sequence[str] = ()) -> Iterator[Found]:
    """Whether the interpreter of the ranks loads the same on all hosts. `already`: what was compared."""
    for what in dict.fromkeys(what for each in found.values() for what in each):
        # A package that is missing or broken on a host tells nothing of its library there.
        values = {name: each[what] for name, each in found.items() if what in each}
        broken = {name: value for name, value in values.items() if value.startswith("broken: ")}
        for value, where in names_by_value(broken).items():
            fact = f"{what} does not load on {all_of(where)}: {value.removeprefix('broken: ')}"
            how = "again" if len(where) == len(found) else "there as on the other hosts"
            yield FAIL, fact, f"install {what} {how}"
        values = {name: value for name, value in values.items() if name not in broken}
        if what not in already and (fact := differences(what, values)):
            fix = "install the same version on every host, or copy it: mpiddp hosts push"
            yield WARN if what.startswith("lib") else FAIL, fact, fix
        elif {*values.values()} == {"missing"}:
            yield WARN, f"{what} is missing on every host", ""


def gpus(each: Mapping[str, Sequence[Gpu]]) -> Iterator[Found]:
    """The GPUs of each host: count, model, driver. The preflight has told what is wrong."""
    if fact := differences("the number of GPUs", {name: len(rows) for name, rows in each.items()}):
        yield FAIL, fact, "see nvidia-smi and dmesg there: a GPU may have fallen off the bus"
    each = {name: found for name, found in each.items() if found}
    for field in ("name", "driver"):
        of_host = {
            name: all_of(sorted({getattr(gpu, field) for gpu in each[name]})) for name in each
        }
        if fact := differences(f"the {field} of the GPUs", of_host):
            is_driver = field == "driver"
            yield FAIL if is_driver else WARN, fact, "install the same driver" if is_driver else ""
    for name, found in each.items():
        if any(gpu.uuid and gpu.errors is None for gpu in found):
            yield UNKNOWN, f"a GPU of {name} does not count errors of its memory (ECC)", ""


def processes(facts: Facts) -> Iterator[Found]:
    """Limits and shared memory of what ssh starts on each host, as mpirun does."""
    for name, found in facts.items():
        if 0 <= (count := found["open files"]) < LEAST_FILES:
            fix = f"raise nofile to {LEAST_FILES} or more there, for sshd too"
            yield FAIL, f"a process may open {count} files on {name}", fix
        if found["infiniband"] and found["locked memory"] != -1:
            fact = f"locked memory is limited on {name}, which InfiniBand needs"
            yield FAIL, fact, "set memlock to unlimited there, for sshd too"
        if found["shm"] < LEAST_SHM:
            fact = f"/dev/shm has {size_text(found['shm'])} of free space on {name}"
            fix = "ls -l /dev/shm there; mount -o remount,rw,size=8G /dev/shm; in Docker: --shm-size 8g"
            yield WARN, fact, fix


def folders(facts: Facts, folders: Sequence[str]) -> Iterator[Found]:
    """Whether each host can read each folder."""
    for path in folders:
        errors = {name: found["folders"][path] for name, found in facts.items()}
        others = [name for name, error in errors.items() if not error]
        for name, error in errors.items():
            if error:
                fact = f"the folder {path} cannot be used on {name}: {error}"
                fact += f"; {all_of(others)} can" if others else ""
                yield FAIL, fact, f"copy or mount it there, or allow it: ls -ld {path}"


def files(facts: Facts) -> Iterator[Found]:
    """Whether the files of the job are the same, by their SHA-256: the first that differs on each host.

    Another version of a file may import others, so what follows tells nothing of that host.
    """
    told: set[str] = set()
    for path in dict.fromkeys(path for found in facts.values() for path in found["files"]):
        all_hashes = {name: found["files"].get(path, "")[:12] for name, found in facts.items()}
        hashes = {name: each for name, each in all_hashes.items() if name not in told}
        told.update(*sorted(names_by_value(hashes).values(), key=len)[:-1])
        if missing := [name for name, digest in hashes.items() if not digest]:
            yield FAIL, f"{path} is missing or unreadable on {all_of(missing)}", _PUSH
        if fact := differences(path, {name: each for name, each in hashes.items() if each}):
            yield FAIL, fact, _PUSH


def reach(
    found: Mapping[str, Mapping[str, Any]], addresses: Mapping[str, str], port: int
) -> Iterator[Found]:
    """Whether each host reaches each other on the job's network, in each direction, with large packets."""
    if not any(found.values()):
        yield UNKNOWN, "no direction between the hosts was tried", ""
    for _, fact, fix in blocked(found, addresses, port):
        yield FAIL, fact, fix
