"""Hosts that a job cannot use, for those who can do without them."""

from __future__ import annotations

from collections.abc import Mapping

from mpiddp.errors import UserError
from mpiddp.hostfile import Host


class Unfit(UserError):
    """Hosts that cannot be used, and for each a sentence with the command that mends it."""

    def __init__(self, complaints: Mapping[Host, str]) -> None:
        super().__init__("\n".join(complaints.values()))
        self.complaints = complaints
