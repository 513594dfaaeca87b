"""What spawns.py needs, in a module of its own that only the caller's host has."""

from dataclasses import dataclass


@dataclass
class Found:
    host: str
    tenfold: int


class Trouble(Exception):
    """An exception that only the caller's own module has."""
