"""The hosts of a job and their slots, parsed from a hostfile or from -H.

Reads Open MPI's hostfile grammar, MPICH's `host:n` and the files of schedulers into one `Hosts`: PBS and LSF
write one line per slot, so that hosts repeat, and Grid Engine writes four columns. Input that mpirun or ssh
would misread raises an error with the file, the line and what to write instead.
Try it: `mpiddp hosts check hostfiles/local`.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mpiddp.errors import UserError, cause_of
from mpiddp.hosts.names import expand_nodelist
from mpiddp.hosts.transport import SSH, Transport
from mpiddp.text import listed, shown

EXAMPLE = "node1 slots=4, for example"

# The values of a line: a pattern of each, what is expected, and an example. A name becomes an argument of
# ssh and of mpirun, so it must not look like an option.
_OF_A_NAME = r"[A-Za-z0-9._-]{0,252}"  # as long as DNS allows
_NAME = 'a name of letters, digits, ".", "_" and "-"', EXAMPLE
_NUMBER = "[0-9]{1,6}", "a positive integer below a million", "node1 slots=4, or node1:4"
_VALUES = {
    "host": (f"[A-Za-z0-9]{_OF_A_NAME}", *_NAME),
    "user": (f"[A-Za-z0-9_]{_OF_A_NAME}", *_NAME),
    **dict.fromkeys(("slots", "max_slots", "port"), _NUMBER),
    "gpus": (
        r"[0-9]{1,3}(,[0-9]{1,3})*|MIG-[\w/-]{1,90}(,MIG-[\w/-]{1,90})*",
        "a list of GPU numbers, or of names of MIG devices",
        "node1 gpus=0,2,3",
    ),
}
_ADDRESS = re.compile(r"(?=.{1,253}$)([0-9.]+|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*)")
_BRACKETED = re.compile(r"\[([^]]*)\](?::(.*))?")
_COMMA = re.compile(r",(?![^[]*\])")  # outside of brackets
_MAX_BYTES = 4 << 20  # the wrong file may be a 10 GB checkpoint, or /dev/zero
MAX_SLOTS = 999_999  # in all. A plan has an entry for each rank


@dataclass(frozen=True)
class Host:
    """One host of a hostfile. Its line does not count when two hosts are compared."""

    name: str  # or an IP literal (IPv6 without brackets)
    slots: int | None = None  # None if neither slots nor GPUs are listed: one per GPU, or 1
    max_slots: int | None = None
    user: str | None = None
    port: int | None = None
    # The numbers of the GPUs that its ranks use, or the names of MIG devices; None for all.
    gpus: tuple[int | str, ...] | None = None
    ranks: int = 0  # which `launch.plan.placement` sets
    address: str = ""  # for ssh, if `name` stands for a login there, see `apart`
    listed: str = ""  # of this machine, for which mpirun gets another `name`: the name in the list
    line: int | None = field(default=None, compare=False)

    @property
    def alias(self) -> str:
        """The host's name for mpirun and in its lists, which take no IPv6 address."""
        return f"mpiddp-{self.name.replace(':', '-')}" if ":" in self.name else self.name

    @property
    def ssh_target(self) -> str:
        """The destination argument of ssh: `name`, or `user@name`."""
        return (
            f"{self.user}@{self.address or self.name}" if self.user else self.address or self.name
        )

    @property
    def apart(self) -> Host:
        """This host with a name of its own, as a container behind a port of a machine that is listed as well."""
        return replace(self, name=f"{self.name}-{self.port or self.user}", address=self.name)

    @property
    def key(self) -> str:
        """The host's name in the list, to compare hosts by. Host names ignore case."""
        return (self.listed or self.name).lower()


@dataclass(frozen=True)
class Hosts:
    """The hosts of a job in the order of their ranks."""

    source: str = field(compare=False)  # the file's name, or "-H"
    hosts: tuple[Host, ...]
    scheduler: str = ""  # that has granted them, "" for hosts that the user names
    transport: Transport = SSH
    starter: str = "mpirun"  # the program that starts their ranks
    options: tuple[tuple[int, str], ...] = ()  # of `mpiddp launch`, by the lines "#: OPTIONS"

    @cached_property
    def usable(self) -> tuple[Host, ...]:
        """The hosts that take ranks: those with slots=0 do not."""
        return tuple(host for host in self.hosts if host.slots != 0)

    @cached_property
    def world_size(self) -> int:
        return sum(host.ranks for host in self.hosts)

    def where(self, host: Host) -> str:
        """The host's position in the input, for an error: `hosts.txt:3`, or `-H`."""
        return self.source if host.line is None else f"{self.source}:{host.line}"


def read_hostfile(path: str | Path) -> Hosts:
    """Read a hostfile. Raises UserError with file, line and a hint, and JobFailed if a machine failed."""
    source = str(path) or '""'
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        folder = "" if Path(path).is_absolute() else f" (looked in {Path.cwd()})"
        fix = "write a line for each host into it, such as: node1 slots=2"
        raise UserError(
            f"{source} not found{folder}. Not falling back to this machine.", fix=fix
        ) from None
    except OSError as error:
        raise cause_of(error)(f"{source} cannot be read: {error.strerror}.") from None
    return parse_hostfile(data, source)


def parse_hostfile(data: bytes, source: str, *, may_repeat: bool = False) -> Hosts:
    """The hosts in a hostfile's bytes, as `read_hostfile`. `source` is the file's name in errors.

    With `may_repeat`, the slots of a host are the sum of all its lines.
    """
    lines = [*enumerate(_text(data, source).split("\n"), start=1)]
    options = tuple((number, line[2:].strip()) for number, line in lines if line.startswith("#:"))
    rows = {number: tokens for number, line in lines if (tokens := _tokens(line.partition("#")[0]))}
    # The columns of sge_pe(5): host, slots, queue instance, processors.
    columns = re.compile(r"\S+ [0-9]{1,6} \S*@\S*( .*)?")
    is_of_grid_engine = all(columns.fullmatch(" ".join(tokens)) for tokens in rows.values())
    if is_of_grid_engine:
        rows = {number: [tokens[0], f"slots={tokens[1]}"] for number, tokens in rows.items()}
    hosts = [
        replace(host, line=number)
        for number, tokens in rows.items()
        for host in _parse_hosts(f"{source}:{number}", tokens)
    ]
    if not hosts:
        raise UserError(f"{source} lists no host.", fix=EXAMPLE)
    # Some schedulers write a line for each slot, so that hosts repeat. If none repeats, no line is a slot.
    are_bare = all(len(row) == 1 and not set(row[0]) & set(":@=[") for row in rows.values())
    do_repeat = len({host.key for host in hosts}) < len(hosts)
    if may_repeat or is_of_grid_engine or (are_bare and do_repeat):
        # One host for each name, at the place of its first line. A line without a number is one slot.
        slots, firsts = Counter[str](), dict[str, Host]()
        for host in hosts:
            slots[host.key] += 1 if host.slots is None else host.slots
            firsts.setdefault(host.key, host)
        hosts = [replace(host, slots=slots[key]) for key, host in firsts.items()]
    return _checked(Hosts(source, tuple(hosts), options=options))


def parse_host_list(text: str) -> Hosts:
    """The hosts of `-H h1:2,h[2-4]:4`. Raises UserError as for a hostfile."""
    return _checked(Hosts("-H", tuple(hosts_between_commas("-H", text))))


def hosts_between_commas(where: str, text: str) -> list[Host]:
    """The hosts of an option. Raises UserError as for a hostfile, but they may repeat."""
    hosts = []
    for entry in _COMMA.split(text):
        if len(tokens := _tokens(entry)) != 1:
            fix = "-H node1:2,node2:4, for example"
            raise UserError(f'{where}: "{shown(entry)}" is not a host.', fix=fix)
        hosts += _parse_hosts(where, tokens)
    return hosts


def without(hosts: Hosts, exclude: str, *, is_first: bool) -> Hosts:
    """The hosts without those of --exclude, which at the first attempt must all be among them."""
    excluded = {host.key for host in hosts_between_commas("--exclude", exclude)}
    unknown = sorted(excluded - {host.key for host in hosts.hosts})
    if unknown and is_first:
        present = listed([host.name for host in hosts.hosts])
        raise UserError(
            f'--exclude: "{shown(unknown[0])}" is not in {hosts.source}, which has {present}.'
        )
    left = tuple(host for host in hosts.hosts if host.key not in excluded)
    if all(host.slots == 0 for host in left):
        raise UserError(f"--exclude {exclude} leaves no slots in {hosts.source}.")
    return replace(hosts, hosts=left)


def _text(data: bytes, source: str) -> str:
    """The file's bytes as text, without a byte order mark. Raises UserError."""
    if len(data) > _MAX_BYTES:
        raise UserError(
            f"{source} is larger than {_MAX_BYTES >> 20} MiB: not a hostfile.", fix=EXAMPLE
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = f"{source}:{data.count(10, 0, error.start) + 1}"
        byte = f"byte 0x{data[error.start]:02x}"
        raise UserError(f"{where}: {byte} is not text.", fix=EXAMPLE) from None


def _tokens(line: str) -> list[str]:
    """The tokens of one line. `slots = 2` is one token, as in Open MPI."""
    return re.findall(r"[^ \t\r]+", "=".join(part.strip(" \t\r") for part in line.split("=")))


def _parse_hosts(where: str, tokens: Sequence[str]) -> list[Host]:
    """The hosts from the tokens of a line: one host, or a set of them, as gpu[01-16]."""
    user, at, rest = tokens[0].rpartition("@")
    name, count = rest, None
    bracketed = _BRACKETED.fullmatch(rest)
    if bracketed and ":" in bracketed[1]:
        name, count = bracketed.groups()
    elif rest.count(":") == 1:
        name, count = rest.split(":")
    try:
        names = expand_nodelist(name) if "[" in name else [name]
    except ValueError as error:
        fix = "gpu[01-16,20] slots=8, for example"
        raise UserError(f'{where}: "{shown(tokens[0])}": {error}.', fix=fix) from None
    name, *more = [_value(where, "host", name, name) for name in names]
    values: dict[str, Any] = {}
    if at:
        values["user"] = _value(where, "user", user, tokens[0])
    if count is not None:
        values["slots"] = _value(where, "slots", count, tokens[0])
    for token in tokens[1:]:
        key, equals, value = token.partition("=")
        key = key.replace("max-slots", "max_slots")
        if not equals or key not in _VALUES.keys() - {"host"}:
            sentence = f'{where}: "{shown(token)}" is not one of slots=, max_slots=, gpus=, port= and user=.'
            raise UserError(sentence, fix=EXAMPLE)
        if key in values:
            raise UserError(f'{where}: "{shown(token)}" sets {key} twice.', fix="remove one")
        values[key] = _value(where, key, value, token)
    host = Host(name, **{"slots": len(values.get("gpus", ())) or None, **values})
    if host.slots is not None and host.max_slots is not None and host.max_slots < host.slots:
        sentence = f"{where}: max_slots={host.max_slots} is less than slots={host.slots}."
        raise UserError(sentence, fix=f"{name} slots={host.max_slots}")
    if host.port is not None and not 1 <= host.port <= 65535:
        raise UserError(f"{where}: port={host.port} is not a port. Expected 1 to 65535.")
    return [host, *(replace(host, name=name) for name in more)]


def _value(where: str, key: str, text: str, token: str) -> Any:
    """The value of a key, checked. An IP address gets its short form; 0 slots are allowed."""
    if key == "host" and _ADDRESS.fullmatch(text):
        try:
            return str(ipaddress.ip_address(text))
        except ValueError:
            raise UserError(
                f'{where}: "{shown(text)}" is not an IP address.', fix=EXAMPLE
            ) from None
    pattern, expected, example = _VALUES[key]
    if not re.fullmatch(pattern, text):
        raise UserError(f'{where}: "{shown(token)}" is not {expected}.', fix=example)
    if key in ("host", "user"):
        return text
    numbers = tuple(int(word) if word.isdigit() else word for word in text.split(","))
    if len(set(numbers)) < len(numbers):
        raise UserError(f'{where}: "{shown(token)}" names a GPU twice.', fix="remove one")
    return numbers if key == "gpus" else numbers[0]


def _checked(hosts: Hosts) -> Hosts:
    """These hosts, if mpirun can tell them apart, and at least one takes a rank. Raises UserError."""
    firsts, ports = dict[str, Host](), defaultdict[str, set[int | None]](set)
    for host in hosts.hosts:
        ports[host.key].add(host.port)
    hosts = replace(
        hosts, hosts=tuple(h.apart if h.port and len(ports[h.key]) > 1 else h for h in hosts.hosts)
    )
    for host in hosts.hosts:
        first = firsts.setdefault(host.key, host)
        if first is not host:
            problem, fix = "listed twice", f"write it once: {host.name}:N"
            if host.line is not None:
                problem, fix = f"already on line {first.line}", "merge them into one slots= line"
            raise UserError(f"{hosts.where(host)}: {host.name} is {problem}.", fix=fix)
    if not hosts.usable:
        raise UserError(
            f"{hosts.source}: every host has slots=0, so no rank can start.", fix=EXAMPLE
        )
    if (total := sum(host.slots or 0 for host in hosts.hosts)) > MAX_SLOTS:
        raise UserError(f"{hosts.source}: {total} slots in all; expected at most {MAX_SLOTS}.")
    return hosts
