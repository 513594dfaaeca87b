"""Keep torch's store from asking DNS while the ranks connect to it.

torch 2.13 looks up the name of every address that its store connects to, only to log it. /etc/hosts
does not help, because torch looks up the addresses' IPv6 form. If DNS does not answer, as on the own
network of many clusters, each connection takes 5 s or more.

tests/cluster/launch/test_network_of_a_job.py fails once torch no longer looks the names up.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def no_dns() -> Iterator[None]:
    """In the body, this process looks up hosts in /etc/hosts only. Without glibc, nothing changes."""
    services = _services()
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)  # glibc's nss.h
    if services is None or configure is None:
        yield
        return
    configure(b"hosts", b"files")
    try:
        yield
    finally:
        configure(b"hosts", services)


def _services() -> bytes | None:
    """The services for hosts in /etc/nsswitch.conf, such as "files dns". None if it has no such line."""
    with suppress(OSError):
        for line in Path("/etc/nsswitch.conf").read_bytes().splitlines():
            database, _, services = line.partition(b"#")[0].partition(b":")
            if database.strip() == b"hosts":
                return services.strip() or None
    return None
