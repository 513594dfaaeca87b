"""Which hosts a command means: --hostfile FILE, -H HOSTS, or FILE alone; else the scheduler's allocation.

-H @gpu is the hostfile ~/.config/mpiddp/hosts/gpu.

mpiddp doctor hosts.txt
mpiddp hosts run -H node1,node2 -- uptime
salloc --nodes 2 mpiddp hosts check
"""

from __future__ import annotations

import argparse
import os
import pwd
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

from mpiddp.arguments import Option, duration
from mpiddp.errors import UserError
from mpiddp.hosts.allocations import find_allocation
from mpiddp.hosts.hostfile import Hosts, parse_host_list, read_hostfile
from mpiddp.hosts.names import is_this_host, resolve_all
from mpiddp.hosts.transport import SSH
from mpiddp.text import remember_hosts

_read_once = cache(read_hostfile)  # a pipe can be read only once, but a restart needs it again


def add_options(parser: argparse.ArgumentParser, *, logs_in: bool) -> None:
    """Add --hostfile and -H, and --login-timeout if the verb logs in to the hosts."""
    parser.set_defaults(login_s=SSH.login_s)
    group = parser.add_argument_group("where (default: the scheduler's allocation)")
    limit = f"time that a login over ssh may take (default: {SSH.login_s:g} s)"
    for option in (
        Option(
            "--hostfile", value="FILE", help="file of hosts and slots; FILE alone means the same"
        ),
        Option("-H", value="HOSTS", dest="host_list", help="hosts: node1:2,node2:4, or @NAME"),
        Option(
            "--login-timeout",
            value="TIME",
            parse=duration,
            dest="login_s",
            default=SSH.login_s,
            help=limit,
        ),
    )[: 3 if logs_in else 2]:
        option.add_to(group)


FILE = Option("file", value="FILE", nargs="?", help="the same as --hostfile FILE")


def settle(options: argparse.Namespace) -> None:
    """Make FILE the value of --hostfile. Raises UserError if the hosts are named twice, or FILE names one."""
    file: str | None = options.file
    refuse_both({str(file): file, "--hostfile": options.hostfile, "-H": options.host_list})
    if file is None:
        return
    if file and os.sep not in file and not os.path.exists(file):  # noqa: PTH110 - False for any error
        raise UserError(
            f"{file} not found (looked in {Path.cwd()}).", fix=f"if it is a host: -H {file}"
        )
    options.hostfile = file


def refuse_both(values: Mapping[str, str | None]) -> None:
    """Raise UserError if two of these options have a value."""
    named = [option for option, value in values.items() if value is not None]
    if len(named) > 1:
        raise UserError(f"{named[0]} and {named[1]} both name the hosts.", fix="give one of them")


def named_hosts(
    hostfile: str | None, host_list: str | None, env: Mapping[str, str], login_s: float
) -> Hosts | None:
    """The hosts that the user names, else those of an allocation; None without one.

    `login_s`: the time that a login may take, in seconds. Raises UserError for a list or an allocation that
    cannot be read, and JobFailed if a machine failed.
    """
    hosts: Hosts | None
    if (typed := _typed(hostfile, host_list)) is not None:
        remember_hosts(typed)
    if hostfile is not None:
        is_file = os.path.isfile(hostfile)  # noqa: PTH113 - False for any error
        hosts = (read_hostfile if is_file else _read_once)(hostfile)
    elif host_list is not None and re.fullmatch(r"@\w[\w.-]*", host_list):
        configured = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")  # noqa: PTH111
        hosts = read_hostfile(Path(configured, "mpiddp/hosts", host_list[1:]))
    elif host_list is not None:
        hosts = parse_host_list(host_list)
    else:
        hosts = find_allocation(env)
        if hosts is not None:
            remember_hosts("")  # `mpiddp hosts` takes the same
    return hosts and replace(
        _told_apart(hosts), transport=hosts.transport._replace(login_s=login_s)
    )


def _typed(hostfile: str | None, host_list: str | None) -> str | None:
    """The hosts for another command line; None if there are none, or if they come from a pipe."""
    if hostfile is not None:
        return None if hostfile.startswith(("/dev/", "/proc/")) else shlex.quote(hostfile)
    return None if host_list is None else f"-H {shlex.quote(host_list)}"


def _told_apart(hosts: Hosts) -> Hosts:
    """The hosts. One that is this machine by its name, but not by its user or its port, such as that of a
    container, is another host: ranks of this machine start without ssh, as this user."""
    suspects = [host for host in hosts.hosts if host.user or host.port]
    resolve_all([host.name for host in suspects])
    own: set[str | int | None] = {None, 22}
    with suppress(KeyError):  # a container may have no entry for its user
        own.add(pwd.getpwuid(os.getuid()).pw_name)
    for file in (Path("/etc/ssh/sshd_config"), *Path("/etc/ssh/sshd_config.d").glob("*.conf")):
        with suppress(OSError):  # not everybody may read it
            text = file.read_text("utf-8", errors="replace")
            own |= {*map(int, re.findall(r"(?mi)^\s*Port[ \t=]+(\d{1,5})\s*$", text))}
    others = [
        host for host in suspects if not {host.user, host.port} <= own and is_this_host(host.name)
    ]
    return replace(
        hosts, hosts=tuple(host.apart if host in others else host for host in hosts.hosts)
    )
