"""When a fault hits, in the ranks of one rehearsal and in the process that runs it. Both see one folder."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from mpiddp.drill.injectors import ACTS, LINK_S, cut_own_link, fill_disk

SETTLE_S = 0.5  # before a fault: a save that runs beside the training may end
HELD_S = 60.0  # a rank waits at most so long for the signal from outside
SLOW_S = 0.05  # a step after that signal, so that a script of a few milliseconds does not end first
_FIRED, _REACHED, _SENT, _REFUSED = "fired", "reached", "sent", "refused"
_FILLER = "filler-of-the-drill"


@dataclass(frozen=True)
class Plan:
    """What the ranks of one rehearsal do to themselves, and when.

    act: "", a name of `injectors.ACTS`, "link" for the link of its host, "hold" for a signal from outside,
        "kill in save" or "full in save".
    last: the step after which the script ends; 0 for where it ends by itself.
    disk: the folder of a small disk that "full in save" fills; "" to raise the error in its place.
    in_files: the script saves into files. A save into memory is then none that a fault could tear.
    """

    act: str = ""
    rank: int = 0
    step: int = 0
    last: int = 0
    disk: str = ""
    in_files: bool = False

    @property
    def is_of_save(self) -> bool:
        return self.act.endswith(" in save")

    def write(self, folder: Path) -> None:
        (folder / "plan.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Plan:
        return cls(**json.loads((folder / "plan.json").read_text()))


def act_in_step(plan: Plan, folder: Path, rank: int, step: int) -> None:
    """Do what the plan says after this step of this rank. An act happens once in all attempts."""
    if plan.act == "hold":
        _hold(plan, folder, rank, step)
        return
    is_here = (plan.rank, plan.step) == (rank, step) and not plan.is_of_save
    if not plan.act or not is_here or (folder / _FIRED).exists():
        return
    time.sleep(SETTLE_S)
    if plan.act == "link":
        _cut(folder)
        return
    _fire(folder)
    ACTS[plan.act]()


def act_in_save(
    plan: Plan,
    folder: Path,
    rank: int,
    step: int,
    write: Callable[[bytes], object] | None,
    data: bytes,
) -> None:
    """In the first save of this rank from the step of the plan on: write a half and die, or find no space."""
    if write is None or rank != plan.rank or step < plan.step:
        return
    if plan.act == "kill in save" and not (folder / _FIRED).exists():
        write(data[: len(data) // 2])
        _fire(folder)
        ACTS["kill"]()
    if plan.act == "full in save" and not (folder / _SENT).exists():
        if plan.disk:  # the save itself then finds no space
            if not (folder / _FIRED).exists():
                fill_disk(Path(plan.disk, _FILLER), leave=len(data) // 2)
                _fire(folder)
            return
        write(data[: len(data) // 2])
        _fire(folder)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _hold(plan: Plan, folder: Path, rank: int, step: int) -> None:
    """Wait for the signal from outside, and make the later steps of this attempt slow."""
    sent = folder / _SENT
    if step > plan.step and (folder / _FIRED).exists() and not (folder / "resumed").exists():
        time.sleep(SLOW_S)
    if step != plan.step or sent.exists():
        return
    time.sleep(SETTLE_S)
    (folder / f"{_REACHED}_{rank}").touch()
    deadline = time.monotonic() + HELD_S
    while not sent.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def _cut(folder: Path) -> None:
    _fire(folder)  # afterwards this host may reach the folder no more
    try:
        cut_own_link(LINK_S)
    except OSError as error:
        (folder / _REFUSED).write_text(f"the host's link cannot be cut: {error}")
        (folder / _FIRED).unlink()


def _fire(folder: Path) -> None:
    (folder / _FIRED).write_text(str(time.time()))


def has_fired(folder: Path) -> bool:
    return (folder / _FIRED).exists()


def refusal(folder: Path) -> str:
    """Why a rank could not do what was planned; "" if it did."""
    file = folder / _REFUSED
    return file.read_text() if file.exists() else ""


def may_go_on(folder: Path, plan: Plan, out: Path) -> None:
    """Before a resume: the disk has space again, the link is whole, and no step is slow.

    Args:
        out: the folder of the run as this process sees it.
    """
    (folder / _SENT).touch()
    (folder / "resumed").touch()
    (out / _FILLER).unlink(missing_ok=True)
    if plan.act == "link" and has_fired(folder):
        over = float((folder / _FIRED).read_text()) + LINK_S + 1
        time.sleep(max(0.0, over - time.time()))


def send_when_held(folder: Path, ranks: int, launcher: int, send: Callable[[int], None]) -> bool:
    """Send the signal once all ranks hold. Return False while they do not."""
    if has_fired(folder):
        return True
    if not all((folder / f"{_REACHED}_{rank}").exists() for rank in range(ranks)):
        return False
    _fire(folder)
    send(launcher)
    time.sleep(0.2)  # the launcher, and a worker that dies of it, are seen before the next step
    (folder / _SENT).touch()
    return True
