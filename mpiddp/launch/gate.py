"""The gate: whether the GPUs that a job will use are in order, from what the preflight has asked each host.

A host with a fault is not used, as one with another complaint. What may only disturb the job is said once.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpiddp.hosts.complaints import ssh_line
from mpiddp.hosts.gpu_faults import faults, notes
from mpiddp.hosts.gpu_health import read_health
from mpiddp.hosts.gpus import NO_ANSWER, chosen_gpus, hides_all_gpus
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.names import is_this_host
from mpiddp.launch.preflight import Checked
from mpiddp.launch.variables import of_host

_ANYWAY = "To start anyway: --no-check"


def check_here(host: Host, env: Mapping[str, str], exports: Mapping[str, str]) -> Checked:
    """The same of this machine, which takes all ranks and is asked nothing else."""
    health = read_health(env.get("PATH"))
    if health is None:
        return Checked({}, {host: NO_ANSWER.format(name=host.name)}, {})
    return check(Checked({}, {}, {}, {host: health}), env, exports)


def check(checked: Checked, env: Mapping[str, str], exports: Mapping[str, str]) -> Checked:
    """`checked` with a complaint for each host with a fault, and with notes, about the GPUs of its ranks.

    exports: the variables of -x.
    """
    broken, noted = dict[Host, str](), dict[Host, list[str]]()
    for host, health in checked.health.items():
        if health.gpus and not hides_all_gpus(own := of_host(host, env, exports)):
            chosen = chosen_gpus(health.gpus, own, host.gpus)
            found = [f"{each} {_ANYWAY}" for each in faults(host.name, health, chosen)]
            if found:
                broken[host] = "\n".join(found)
            ssh = "" if is_this_host(host.name) else ssh_line(host)
            noted[host] = [*notes(host.name, health, chosen, ssh)]
    return checked._replace(complaints={**broken, **checked.complaints}, notes=noted)
