"""Ports of this machine."""

from __future__ import annotations

import socket


def reserved(address: str) -> socket.socket:
    """A socket that reserves a port. The kernel never assigns it, but a process may request it."""
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind((address, 0))
    return reservation
