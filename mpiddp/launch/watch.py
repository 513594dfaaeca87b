"""Ranks that hang, and stragglers, by the record of an attempt; and when to look at the stacks of all ranks.

A job that is quiet for long may evaluate, save, or make a slow first step. So there are two looks at its
stacks, which cost a rank a few milliseconds. A straggler shows in the times of its steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpiddp.launch.events import CHRONIC, Record
from mpiddp.launch.pace import WINDOW_S
from mpiddp.launch.places import Place, place_of
from mpiddp.text import seconds

QUIET_S, QUIET_STEPS = 60.0, 20  # until the first look: the longer of these, in median steps
BETWEEN_LOOKS_S = 10.0
BUSY_FACTOR = 5  # ranks that compute or save may be in one line for so much longer
_BUSY = 0.2  # of a core
_NAMED = 4  # ranks of one place

FACTOR, FACTOR_OF_SEVERAL = 1.3, 2.0  # of the others' own time
_MOST_LATE = 2 / 3  # of all ranks
_LEAST_SHARE = 0.5  # of a step: if the rank is faster, something else takes the time
_MOST_SPREAD = 1.2  # of the times of a step: ranks that differ more do not wait for each other

# --- stragglers: a rank's own work makes the others wait ---


def find_stragglers(record: Record, now: float) -> dict[str, Any]:
    """The ranks that make the others wait in the latest steps, the slowest first, and what they do.

    As the facts of "window". Nobody is slow in a job that makes no steps.
    """
    nobody: dict[str, Any] = {"ranks": [], "works": ""}
    if record.newest_step[1] <= now - WINDOW_S:
        return nobody
    times = {rank: time for rank, pace in record.paces.items() if (time := pace.step_time)}
    step_s = [each.step_s for each in times.values()]
    if len(times) < 2 or max(step_s) > _MOST_SPREAD * min(step_s):
        return nobody
    by_time = sorted(times, key=lambda rank: times[rank].own_s, reverse=True)
    time = times[by_time[0]]
    if time.own_s < _LEAST_SHARE * time.step_s:
        return nobody
    late = [rank for rank in by_time if times[rank].own_s * FACTOR > time.own_s]
    for number, factor in ((len(late), FACTOR_OF_SEVERAL), (1, FACTOR)):
        if number <= _MOST_LATE * len(times):
            others_s = times[by_time[(number + len(times) - 1) // 2]].own_s  # the one in the middle
            if time.own_s >= factor * others_s:
                times_as_long = time.own_s / max(others_s, 1e-9)
                often = f"{times_as_long:.1f}" if times_as_long < 100 else "over 100"
                works = f"works for {seconds(time.own_s)} in a step of {seconds(time.step_s)}"
                works = f"{works}, {often} times as long as the others."
                return {"ranks": by_time[:number], "works": works}
    return nobody


def straggler_sentence(record: Record, *, is_chronic: bool = False) -> tuple[list[int], str]:
    """The stragglers of the latest window, and a sentence about them; "" for none.

    is_chronic: only those of the latest CHRONIC windows.
    """
    windows = list(record.windows)
    if not windows or (is_chronic and len(windows) < CHRONIC):
        return [], ""
    found, works = windows[-1].facts["ranks"], windows[-1].facts["works"]
    for window in windows if is_chronic else ():
        found = [rank for rank in found if rank in window.facts["ranks"]]
    are = "is a straggler: it" if len(found) == 1 else "are stragglers: each"
    return found, f"{record.names(found)} {are} {works}" if found else ""


# --- hangs ---


def next_look_at(record: Record) -> float:
    """When to ask for the stacks; infinity once a hang is found, until a rank shows that it lives.

    With --hang-timeout, the job makes no step in so long only if it hangs. Without it, the limit is a guess
    from the steps: two looks have to confirm it, as before the first step.
    """
    quiet_since, patience_s = _quiet_since(record), _patience_s(record)
    looks = _looks(record)
    if not looks:
        return quiet_since + patience_s
    if len(looks) == 1:
        return looks[-1][0] + BETWEEN_LOOKS_S
    return float("inf") if _is_hung(record) else looks[-1][0] + patience_s


def hang_sentences(record: Record) -> list[str]:
    """Sentences about a hang by the latest look at the stacks."""
    limit_s, looks = record.fact("began", "hang_timeout_s"), _looks(record)
    if not looks:
        return []
    if limit_s is not None and record.paces:
        return stuck_sentences(record, limit_s)
    if not _is_hung(record):
        return []
    what = "made a step" if record.newest_step[0] else "made a step or printed anything"
    quiet_s = looks[-1][0] - _quiet_since(record)
    return [f"no rank has {what} for {quiet_s:.0f} s: {places_sentence(record)}"]


def _quiet_since(record: Record) -> float:
    """When a rank has last shown that it lives. What the job prints counts until there are steps."""
    signs = [pace.since for pace in record.paces.values()]
    if record.fact("began", "hang_timeout_s") is None or not signs:  # else the steps alone count
        if not record.newest_step[0]:
            signs = [event.at for event in record.latest["printed"].values()]
        signs += [record.last_saved_at, *record.saving.values()]
        signs += [event.at for event in record.done.values()]
    return max(record.began_at, *signs)


def _patience_s(record: Record) -> float:
    usual_s = next((pace.median_s for pace in record.paces.values()), 0.0)  # as long on all ranks
    return record.fact("began", "hang_timeout_s") or max(QUIET_S, QUIET_STEPS * usual_s)


def _looks(record: Record) -> list[tuple[float, Mapping[int, Place]]]:
    """The latest two looks, without those before a rank has moved."""
    quiet_since = _quiet_since(record)
    return [look for look in record.looks if look[0] >= quiet_since]


def _is_hung(record: Record) -> bool:
    """Whether no rank has moved between two looks, and one that the others may wait for does nothing."""
    looks = _looks(record)
    if len(looks) < 2:
        return False
    (before, first), (now, last) = looks
    if any(first.get(rank, Place()).frames != place.frames for rank, place in last.items()):
        return False
    # On a crowded host, a rank that computes has a core for a small part of the time.
    idle_s = _BUSY * (now - before)
    is_idle = [
        place.state != "R" and place.cpu_s - first[rank].cpu_s < idle_s
        for rank, place in last.items()
        if not place.waits
    ]
    if len(is_idle) == len(last) and not (record.newest_step[0] and any(is_idle)):
        return False  # nobody waits for another rank: all compute, or a program makes no steps
    if now - _quiet_since(record) >= BUSY_FACTOR * _patience_s(record):
        return True
    return not record.saving and (any(is_idle) or not is_idle)


# --- where the ranks are ---


def places_of(record: Record) -> dict[int, Place]:
    """The places of the ranks that have not ended, by the stacks that they have sent."""
    return {rank: place_of(record.stacks.get(rank)) for rank in record.left}


def places_sentence(record: Record) -> str:
    """ "15 ranks wait in all_reduce (train.py:88); rank 11 on gpu03 is in load (data.py:40): open(path)."."""
    groups: dict[tuple[int, str, str], list[int]] = {}  # those that wait first, and the largest
    for rank, place in places_of(record).items():
        groups.setdefault((0 if place.waits else 1, *place.clauses), []).append(rank)
    if finished := sorted(record.done):  # others may wait for them in vain
        groups[2, "has finished", "have finished"] = finished
    clauses = []
    for key, members in sorted(groups.items(), key=lambda group: (group[0][0], -len(group[1]))):
        several = len(members) > _NAMED
        who = f"{len(members)} ranks" if several else ", ".join(map(record.name, members))
        clauses.append(f"{who} {key[1 if len(members) == 1 else 2]}")
    return "; ".join(clauses) + "."


def stuck_sentences(record: Record, timeout_s: float) -> list[str]:
    """A sentence for each stuck rank, followed by its stack.

    The stuck ranks are those that do not answer; else those that are behind; else those that are outside
    of torch, where the others wait.
    """
    left, stacks = record.left, record.stacks
    steps = {rank: stacks[rank]["step"] for rank in left if rank in stacks}
    furthest = max(steps.values(), default=0)
    mute = [rank for rank in left if rank not in steps]
    held = [rank for rank in steps if stacks[rank]["is_held"]]
    behind = [rank for rank, step in steps.items() if step < furthest]
    outside = [rank for rank in steps if not place_of(stacks[rank]).waits]
    # None waits if the rank is the only one that is left, nor do ranks of which none has answered.
    others = f"others wait at step {furthest}." if steps and len(left) > 1 else ""
    rest = f" while the {others}" if others else "."
    if mute or held:
        why = ": native code holds its Python interpreter."
        if mute:
            why = " and does not answer: it is stopped, or stuck in native code."
        rest = f"{why} The {others}" if others else why
    found = []
    for rank in mute or held or behind or outside or left:
        sentence = f"{record.name(rank)} has made no step for {timeout_s:g} s{rest}"
        if rank in steps:
            sentence = f"{sentence} Its Python stack follows.\n{stacks[rank]['text'].rstrip()}"
        found.append(sentence)
    return found


def missing_sentence(record: Record, timeout_s: float) -> str:
    """A sentence that names the ranks that did not join, with the line that the first of them executes."""
    first, *others = missing = record.missing
    names = ", ".join(map(record.name, missing))
    owner = f"The last words of rank {first}" if others else "Its last words"
    started, frames = record.latest["started"], place_of(record.stacks.get(first)).frames
    own = [frame for frame in frames if not frame[0].startswith("<frozen ")]  # of the import system
    if first not in started:
        words = "none; its Python has not started."
    elif first in record.done:
        words = "none; it has ended, with exit code 0."
    elif first not in record.stacks:
        pid = started[first].facts["pid"]
        words = f"none; it started (pid {pid}) but does not answer: it is stopped, or stuck in native code."
    elif own:
        words = "in {}, line {}, in {}: {}".format(*own[-1])
    else:
        words = "none; its Python stack shows no line of a script."
    return (
        f"only {record.world_size - len(missing)} of {record.world_size} ranks joined in {timeout_s:g} s. "
        f"Missing: {names}. {owner}: {words}"
    )
