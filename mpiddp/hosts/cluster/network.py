"""`mpiddp hosts check --network`: the links of every host, who would use which, and what differs.

mpiddp hosts check hostfiles/two_nodes --network
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mpiddp.errors import UserError
from mpiddp.hosts import fabric, interfaces
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.names import resolve_all
from mpiddp.hosts.slurm import compress_names
from mpiddp.hosts.sources import program_with
from mpiddp.hosts.ssh import run_on_hosts
from mpiddp.hosts.ssh_complaints import login_failed
from mpiddp.text import align_columns, escaped, names_by_value

_ANSWER_S = 30.0
_PROOF = (
    "mpiddp-network"  # begins the line of facts; the start-up files of a shell may print before it
)

Facts = Mapping[str, Any]


def ask(hosts: Sequence[Host]) -> dict[str, Facts]:
    """The facts of each host, by its name. Raises UserError with a sentence for each that does not answer."""
    names = [host.name for host in hosts]
    resolve_all(names)
    facts = f"sys.modules[{fabric.__name__!r}].facts({names!a})"
    program = program_with(
        (interfaces, fabric), f"import json; print({_PROOF!r} + json.dumps({facts}))"
    )
    found: dict[str, Facts] = {}
    complaints = []
    for host, answer in run_on_hosts(hosts, "python3", program, timeout_s=_ANSWER_S).items():
        _, proof, text = answer.stdout.partition(_PROOF)
        if proof and answer.exit_code == 0:
            found[host.name] = json.loads(text)
            continue
        missing = f"{host.name}: python3 is missing there."
        complaint = login_failed(
            host, answer.exit_code, answer.stderr, limit_s=_ANSWER_S, missing=missing
        )
        complaints.append(complaint)
    if complaints:
        raise UserError("\n".join(complaints))
    return found


def report(found: Mapping[str, Facts]) -> str:
    """The links of each host, who takes which, and what differs."""
    rows = [("host", "link", "address", "speed", "MTU", "state")]
    choices: dict[str, str] = {}
    for host, facts in found.items():
        rows += [
            (
                host,
                each["name"],
                each["address"] or "-",
                _speed(each["speed"]),
                str(each["mtu"] or "-"),
                each["state"] or "-",
            )
            for each in facts["links"]
        ]
        rows += [
            (host, each["name"], each["interface"] or "-", each["rate"] or "-", "-", _state(each))
            for each in facts["devices"]
        ]
        choices[host] = "NCCL would take {nccl}, gloo {gloo}; mpiddp sets {mpiddp}".format(**facts)
    lines = [
        align_columns(rows),
        *(f"{compress_names(names)}: {text}" for text, names in names_by_value(choices).items()),
    ]
    return escaped("\n".join([*lines, *differences(found)]), keep="\n")


def differences(found: Mapping[str, Facts]) -> list[str]:
    """A line for each property of a link that is not the same on all hosts. Bridges do not count."""
    properties: dict[str, dict[str, str]] = {}
    for host, facts in found.items():
        for each in facts["links"]:
            if not interfaces.Interface(each["name"], "", "").is_virtual:
                properties.setdefault(f"{each['name']}, speed", {})[host] = _speed(each["speed"])
                properties.setdefault(f"{each['name']}, MTU", {})[host] = str(each["mtu"] or "-")
                properties.setdefault(f"{each['name']}, state", {})[host] = each["state"] or "-"
        for each in facts["devices"]:
            properties.setdefault(f"{each['name']}, rate", {})[host] = each["rate"] or "-"
            properties.setdefault(f"{each['name']}, state", {})[host] = _state(each)
    lines = []
    for name, values in properties.items():
        # Its state says on which hosts it is missing.
        hosts = found if name.endswith("state") else values
        groups = names_by_value({host: values.get(host, "missing") for host in hosts})
        if len(groups) > 1:
            each_group = [f"{value} on {compress_names(names)}" for value, names in groups.items()]
            lines.append(f"differs: {name}: {', '.join(each_group)}")
    return lines or ["nothing differs between the hosts"]


def _speed(mbit: int | None) -> str:
    return "-" if mbit is None else f"{mbit / 1000:g} Gbit/s"


def _state(device: Mapping[str, str]) -> str:
    return f"{device['state'] or '-'}, {device['kind']}"
