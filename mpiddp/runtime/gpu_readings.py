"""What the GPUs of a host do while its ranks train: the agent of its first rank reads it for the launcher.

A thread starts the vendor's tool every ten seconds. The first failure ends it: a tool that is missing, hangs,
or tells nothing of the ranks' GPUs, is not asked again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from mpiddp.errors import aid
from mpiddp.hosts.gpus import CHANGING, chosen_gpus, hides_all_gpus, read_gpus

EVERY_S, LIMIT_S = 10.0, 5.0


@contextmanager
def reading_gpus(ranks: Sequence[int], env: Mapping[str, str], send: Callable[..., None]) -> Iterator[None]:
    """In the body, send the launcher the readings of the `ranks` of this host, in their order."""
    is_over = threading.Event()

    @aid("readings of the GPUs")
    def read() -> None:
        while not (hides_all_gpus(env) or is_over.wait(EVERY_S)):
            gpus = read_gpus(env.get("PATH"), timeout_s=LIMIT_S) or []
            rows = [
                {"rank": rank, **{name: getattr(gpus[number], name) for name in CHANGING}}
                for rank, number in zip(ranks, chosen_gpus(gpus, env), strict=False)
                if number is not None  # the GPU is known, see `process_group.device_of`
            ]
            if all(row[name] is None for row in rows for name in CHANGING if name != "slowed"):
                return
            send("gpus", ranks=rows)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    yield
    is_over.set()
    thread.join(LIMIT_S)  # then no tool runs that would be taken for a process of the script
