"""Write a hostfile in the format of one MPI, and compare two hostfiles."""

from __future__ import annotations

from typing import Literal

from mpiddp.errors import UserError
from mpiddp.hosts.hostfile import Host, Hosts, slots_of
from mpiddp.text import listed

MpiName = Literal["openmpi", "mpich", "intelmpi"]
Form = Literal["openmpi", "mpich", "slurm"]

MPI_NAMES: dict[MpiName, str] = {"openmpi": "Open MPI", "mpich": "MPICH", "intelmpi": "Intel MPI"}


def render(hosts: Hosts, form: Form) -> str:
    """The hosts as a hostfile for one MPI. Raises UserError for a key that this MPI cannot express.

    - `openmpi`: `user@node1 slots=2 max_slots=4 port=2222`.
    - `mpich` (and Intel MPI): `node1:2 user=joe`. max_slots and hosts with 0 slots are left out:
      Hydra has no such limit; a count of 0 crashes MPICH's Hydra, and Intel's ignores it.
    - `slurm`: one line per rank with its node's name, for SLURM_HOSTFILE and
      `srun --distribution=arbitrary`. Users and ports are left out because Slurm does not use ssh.
      Each host's slot count must be known.

    No MPI has a key for `gpus`: they stand in a comment, on a line of its own because MPICH reads no other.
    """
    if form == "slurm":
        lines = [host.name for host in hosts.hosts for _ in range(slots_of(hosts, host))]
    else:
        used = [host for host in hosts.hosts if form == "openmpi" or host.slots != 0]
        lines = [line for host in used for line in _lines(hosts, host, form)]
    return "".join(f"{line}\n" for line in lines)


def _lines(hosts: Hosts, host: Host, mpi: MpiName) -> list[str]:
    line = render_host(hosts, host, mpi)
    return (
        [line] if host.gpus is None else [f"# for mpiddp launch: {host.name} {_gpus(host)}", line]
    )


def _gpus(host: Host) -> str:
    """ "gpus=0,2,3", "" without a list."""
    return "" if host.gpus is None else f"gpus={','.join(map(str, host.gpus))}"


def render_host(hosts: Hosts, host: Host, mpi: MpiName) -> str:
    """The line of one host in this MPI's format. Raises UserError for a key that it cannot express."""
    if mpi == "openmpi":
        keys = {"slots": host.slots, "max_slots": host.max_slots, "port": host.port}
        written = [f"{key}={value}" for key, value in keys.items() if value is not None]
        return " ".join([host.ssh_target, *written])
    where = hosts.where(host)
    if host.port is not None:
        raise UserError(
            f"{where}: {MPI_NAMES[mpi]}'s hostfile format cannot express port={host.port}. "
            f'Put "Port {host.port}" under "Host {host.name}" in ~/.ssh/config.'
        )
    if ":" in host.name:
        raise UserError(
            f"{where}: {MPI_NAMES[mpi]}'s hostfile format cannot express the IPv6 address {host.name}. "
            "Give it a name in /etc/hosts, or use IPv4."
        )
    if host.slots == 0:
        raise UserError(
            f"{where}: {MPI_NAMES[mpi]}'s hostfile format cannot express slots=0. "
            f"Remove {host.name}."
        )
    count = "" if host.slots is None else f":{host.slots}"
    return f"{host.name}{count} user={host.user}" if host.user else f"{host.name}{count}"


def diff(a: Hosts, b: Hosts) -> list[str]:
    """The differences between two hostfiles, one per line; empty if they place ranks identically."""
    old, new = ({host.key: host for host in hosts.hosts} for hosts in (a, b))
    lines = [f"{old[key].name}: only in {a.source}" for key in old if key not in new]
    lines += [f"{new[key].name}: only in {b.source}" for key in new if key not in old]
    both = [key for key in old if key in new]
    for key in both:
        if old[key] != new[key]:
            was, now = (
                f"{render_host(hosts, host, 'openmpi')} {_gpus(host)}".rstrip()
                for hosts, host in ((a, old[key]), (b, new[key]))
            )
            lines.append(f"{was} -> {now}")
    if both != (order := [key for key in new if key in old]):
        lines.append(f"order: {listed(both)} -> {listed(order)}")
    return lines
