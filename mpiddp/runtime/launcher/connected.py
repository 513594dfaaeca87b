"""Moved to `mpiddp.runtime.job.session` and `mpiddp.runtime.reports`."""

from collections.abc import Iterator
from contextlib import contextmanager

from mpiddp.runtime.job.session import Session
from mpiddp.runtime.job.session import script_session as script_session
from mpiddp.runtime.reports import saving as saving
from mpiddp.world import World


@contextmanager
def connected(world: World) -> Iterator[Session]:
    """The session of this process, which its agent reports."""
    yield script_session()
