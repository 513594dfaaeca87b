"""ssh as this package calls it: it asks for nothing, and its own checks stay as the user has set them."""

from __future__ import annotations

from mpiddp.hostfile import Host

CONNECT_TIMEOUT_S = 5


def ssh_to(host: Host) -> list[str]:
    """The command, up to what is to be run there."""
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}", "-T"]
    port = ["-p", str(host.port)] if host.port else []
    # "--" ends ssh's options; the hostfile's grammar already lets no name begin with a dash.
    return ["ssh", *options, *port, "--", host.ssh_target]
