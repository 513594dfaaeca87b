"""`mpiddp hosts push --image`: bring the image of a container to every host that has not the same one."""

from __future__ import annotations

import os
import subprocess

from mpiddp.errors import DONE, FAILED, UserError, print_error
from mpiddp.hosts import gpus
from mpiddp.hosts.containers import Image, identity
from mpiddp.hosts.facts import VERSION_S
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.ssh import ask_hosts, config_file, other_hosts, program_that_prints
from mpiddp.hosts.transport import Transport
from mpiddp.text import escaped


def push_image(image: Image, hosts: Hosts) -> int:
    """Send the image of this host. Returns 1 if a host failed. Raises UserError if it is not here, or a file."""
    if image.is_file:
        raise UserError(
            f"--image {image.name} is a file, which a push of its folder sends.", fix=image.fix()
        )
    (program, *arguments), transport = image.facts, hosts.transport
    if not (here := identity(gpus.tool_output(program, arguments, None, VERSION_S) or "")):
        raise UserError(f"{program} has no image {image.name} here, or its service does not run.")
    ask = program_that_prints(
        (gpus,), f"tool_output({program!a}, {arguments!a}, None, {VERSION_S})"
    )
    answers = ask_hosts(other_hosts(hosts.hosts), ask, work_s=2 * VERSION_S, transport=transport)
    code = DONE
    for host, answer in answers.items():
        if identity(answer.value or "") == here:
            print(f"{host.name}: nothing has changed")
        elif why := answer.why or _send(image, host, transport):
            print_error(why)
            code = FAILED
        else:
            print(f"{host.name}: has {image} now")
    return code


def _send(image: Image, host: Host, transport: Transport) -> str:
    """Send the image to a host. Returns why it has not got it, or ""."""
    print_error(f"pushing {image} to {host.name}")
    with config_file([host], transport) as config:
        line, ssh = f"{image.program} load", ("ssh", "-F", config, "-T", "--", host.alias)
        load = (
            [*ssh, line]
            if transport.is_ssh
            else [*transport.agent, host.name, *transport.shell, line]
        )
        with subprocess.Popen([image.program, "save", image.name], stdout=subprocess.PIPE) as saves:
            env = transport.environment(os.environ)
            done = subprocess.run(load, env=env, stdin=saves.stdout, capture_output=True)
    said = done.stderr.decode(errors="replace").strip()
    return (
        f"{host.name}: {line} failed: {escaped(said)[-200:]}"
        if done.returncode or saves.returncode
        else ""
    )
