"""The checks of the doctor. Each compares the answers of the hosts, and yields its findings.

A check gets the answers by the names of the hosts. If hosts differ, the minority is named. A value that
cannot be read is "unknown", never "ok".
"""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from mpiddp.hosts.gpus import Gpu
from mpiddp.text import (
    all_of,
    differences,
    for_these_hosts,
    from_here,
    keys_by_value,
    size_text,
)

OK, WARN, FAIL, UNKNOWN = "ok", "warn", "fail", "unknown"
Finding = tuple[str, str, str]  # one of the four words, the fact, and its fix ("" for none)
Facts = Mapping[str, Mapping[str, Any]]

LEAST_FILES = 1024  # a rank has sockets to all others, and pipes to its data loaders
LEAST_SHM = 512e6  # Docker's 64 MB do not hold the batches of a few workers
_PUSH = "copy it again: mpiddp hosts push HOSTFILE"
_OF_PREFLIGHT = ("torch", "mpi4py")  # the preflight of the launch has compared their versions


@dataclass(frozen=True)
class Line:
    """One result of a check."""

    check: str
    status: str
    fact: str
    fix: str = ""


def results(check: str, findings: Iterable[Finding], ok_text: str) -> list[Line]:
    """The lines of a check, or one line with `ok_text` if it has found nothing."""
    lines = [Line(check, status, fact, for_these_hosts(fix)) for status, fact, fix in findings]
    return lines or [Line(check, OK, ok_text)]


def names(facts: Facts) -> Iterator[Finding]:
    """Whether each host's name resolves to its own address, on every host."""
    for name, host in ((name, host) for name, host in facts.items() if name in host["names"]):
        answers = {here: other["names"].get(name, []) for here, other in facts.items()}
        if unresolved := [here for here, addresses in answers.items() if not addresses]:
            fix = f"add {name} to DNS, or to /etc/hosts there"
            yield WARN, f"{name} cannot be resolved from {all_of(unresolved)}", fix
        for here, addresses in answers.items():
            if here != name and addresses and not {*addresses} & {*host["addresses"]}:
                fact = f"{name} resolves to {all_of(addresses)} on {here}, which is no address of {name}"
                yield WARN, fact, f"correct {name} in DNS or in /etc/hosts of {here}"
        itself = [text.partition("%")[0] for text in host["names"].get(host["hostname"], [])]
        if len(facts) > 1 and (loops := [text for text in itself if ip_address(text).is_loopback]):
            fact = f"{name}'s own name resolves to {loops[0]} there, which no other host can reach"
            yield WARN, fact, f"give it its real address in /etc/hosts of {name}"


def stacks(stacks: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    """Whether the Python of the ranks loads the same on all hosts."""
    for part in dict.fromkeys(part for stack in stacks.values() for part in stack):
        # A host whose package is missing or broken tells nothing of the package's library.
        values = {name: stack[part] for name, stack in stacks.items() if part in stack}
        broken = {name: value for name, value in values.items() if value.startswith("broken: ")}
        for value, hosts in keys_by_value(broken).items():
            fact = f"{part} does not load on {all_of(hosts)}: {value.removeprefix('broken: ')}"
            how = "again" if len(hosts) == len(stacks) else "there as on the other hosts"
            yield FAIL, fact, f"install {part} {how}"
        values = {name: value for name, value in values.items() if name not in broken}
        if part not in _OF_PREFLIGHT and (fact := differences(part, values)):
            fix = "install the same version on every host, or copy it: mpiddp hosts push HOSTFILE"
            yield WARN if part.startswith("lib") else FAIL, fact, fix
        elif {*values.values()} == {"missing"}:
            yield WARN, f"{part} is missing on every host", ""


def gpus(gpus: Mapping[str, Sequence[Gpu]]) -> Iterator[Finding]:
    """Whether the hosts have equally many GPUs, of one model, with one driver."""
    if fact := differences("the number of GPUs", {name: len(rows) for name, rows in gpus.items()}):
        yield FAIL, fact, "see nvidia-smi and dmesg there: a GPU may have fallen off the bus"
    for field, status, fix in (("name", WARN, ""), ("driver", FAIL, "install the same driver")):
        values = {
            name: all_of(sorted({getattr(gpu, field) for gpu in rows}))
            for name, rows in gpus.items()
            if rows
        }
        if fact := differences(f"the {field} of the GPUs", values):
            yield status, fact, fix
    for name, rows in gpus.items():
        if any(gpu.uuid and gpu.errors is None for gpu in rows):
            yield UNKNOWN, f"a GPU of {name} does not count errors of its memory (ECC)", ""


def processes(facts: Facts) -> Iterator[Finding]:
    """Whether a process that ssh starts may have enough open files and memory on each host."""
    for name, host in facts.items():
        if 0 <= (count := host["open files"]) < LEAST_FILES:
            fix = f"raise nofile to {LEAST_FILES} or more there, for sshd too"
            yield FAIL, f"a process may open {count} files on {name}", fix
        if host["infiniband"] and host["locked memory"] != -1:
            fact = f"locked memory is limited on {name}, which InfiniBand needs"
            yield FAIL, fact, "set memlock to unlimited there, for sshd too"
        if host["shm"] < LEAST_SHM:
            fact = f"/dev/shm has {size_text(host['shm'])} of free space on {name}"
            fix = "ls -l /dev/shm there; mount -o remount,rw,size=8G /dev/shm; in Docker: --shm-size 8g"
            yield WARN, fact, fix


def folders(facts: Facts, folders: Sequence[str]) -> Iterator[Finding]:
    """Whether each host can read each folder."""
    for path in folders:
        errors = {name: host["folders"][path] for name, host in facts.items()}
        others = [name for name, error in errors.items() if not error]
        for name, error in errors.items():
            if error:
                fact = f"the folder {path} cannot be used on {name}: {error}"
                fact += f"; {all_of(others)} can" if others else ""
                fix = f"copy or mount it there, or allow it: ls -ld {path}"
                if os.path.isdir(path) and error == os.strerror(errno.ENOENT):  # noqa: PTH112
                    fix = f"mpiddp hosts push HOSTFILE {shlex.quote(from_here(path))}, or mount it there"
                yield FAIL, fact, fix


def files(facts: Facts) -> Iterator[Finding]:
    """Whether the files of the job are the same, by their SHA-256.

    Of each host, only the first file that differs is named, because another version may import other files.
    """
    hosts = dict(facts)
    for path in dict.fromkeys(path for host in facts.values() for path in host["files"]):
        hashes = {name: host["files"].get(path, "")[:12] for name, host in hosts.items()}
        for others in sorted(keys_by_value(hashes).values(), key=len)[:-1]:
            hosts = {name: host for name, host in hosts.items() if name not in others}
        if missing := [name for name, digest in hashes.items() if not digest]:
            yield FAIL, f"{path} is missing or unreadable on {all_of(missing)}", _PUSH
        if fact := differences(path, {name: digest for name, digest in hashes.items() if digest}):
            yield FAIL, fact, _PUSH
