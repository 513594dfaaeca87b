"""Keep torch's store from asking DNS while the ranks connect to it.

torch 2.13 looks up the name of every address that its store connects to, for a line in a log.
/etc/hosts does not help, as torch asks for the addresses' IPv6 form. Where DNS does not answer, as on
many a cluster's own network, each connection would cost 5 s or more of silence.

tests/test_network_of_a_job.py fails on the day that torch no longer asks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def no_dns() -> Iterator[None]:
    """Within the body this process looks hosts up in /etc/hosts alone: with glibc, elsewhere as ever."""
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
    """What /etc/nsswitch.conf says of hosts, "files dns" for one; None where it says nothing."""
    with suppress(OSError):
        for line in Path("/etc/nsswitch.conf").read_bytes().splitlines():
            database, _, services = line.partition(b"#")[0].partition(b":")
            if database.strip() == b"hosts":
                return services.strip() or None
    return None
