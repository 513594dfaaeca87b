"""ssh as this package calls it: it asks for nothing, and its own checks stay as the user has set them."""

from __future__ import annotations

import shlex
import shutil

from mpiddp.errors import UserError
from mpiddp.hosts.hostfile import Host

CONNECT_TIMEOUT_S = 5


def require_ssh() -> None:
    """Raise a UserError where there is no ssh."""
    if shutil.which("ssh") is None:
        raise UserError("ssh is not installed here. Run: sudo apt-get install openssh-client")


def ssh_to(host: Host) -> list[str]:
    """The command, up to what is to be run there."""
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}", "-T"]
    port = ["-p", str(host.port)] if host.port else []
    # "--" ends ssh's options; the hostfile's grammar already lets no name begin with a dash.
    return ["ssh", *options, *port, "--", host.ssh_target]


def in_sh(script: str) -> str:
    """A fixed line of Bourne shell, for hosts where users log in with another: csh, fish."""
    return f"exec sh -c {shlex.quote(script)}"
