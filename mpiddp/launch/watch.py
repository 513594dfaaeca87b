"""Ranks that hang, and stragglers, by the record of an attempt; and when to look at the stacks of all ranks.

A rank waits if a collective of torch that it has entered has not ended. In a script without torch, its stack
shows it. A job that is quiet for long may evaluate, save, or make a slow first step. So there are two looks
at the stacks, which cost a rank a few milliseconds, and the sentence says only who waits for whom.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mpiddp.launch.collectives import Wait, called_at, find_wait
from mpiddp.launch.events import CHRONIC, Record
from mpiddp.launch.places import Place, place_of

QUIET_S, QUIET_STEPS = 60.0, 20  # until the first look: the longer of these, in median steps
BETWEEN_LOOKS_S = 10.0
BUSY_FACTOR = 5  # ranks that compute or save may be in one line for so much longer
_NAMED = 4  # ranks of one place


def straggler_sentence(record: Record) -> tuple[list[int], str]:
    """The stragglers of all of the latest CHRONIC windows, and a sentence about them; "" for none."""
    windows = [window.facts for window in record.windows]
    if len(windows) < CHRONIC:
        return [], ""
    found, share = windows[-1]["ranks"], windows[-1]["share"]
    found = [rank for rank in found if all(rank in window["ranks"] for window in windows)]
    are, them = ("is a straggler", "it") if len(found) == 1 else ("are stragglers", "them")
    wait = f"the others wait for {them} in {share:.0%} of the time."
    return found, f"{record.names(found)} {are}: {wait}" if found else ""


# --- hangs ---


def next_look_at(record: Record) -> float:
    """When to ask for the stacks; infinity once a hang is found, until a rank shows that it lives.

    With --hang-timeout, the job makes no step in so long only if it hangs. Without it, the limit is a guess
    from the steps: two looks have to confirm it, as before the first step.
    """
    looks, patience_s = _looks(record), _patience_s(record)
    if not looks:
        return _quiet_since(record) + patience_s
    if len(looks) == 1:
        return looks[-1][0] + BETWEEN_LOOKS_S
    is_named = _wait(record) is None and _is_hung(record)
    return float("inf") if is_named else looks[-1][0] + patience_s


def hang_sentences(record: Record) -> dict[str, str]:
    """Sentences by the latest look at the stacks, by what they are about: each of those is said once."""
    limit_s, looks = record.fact("began", "hang_timeout_s"), _looks(record)
    if len(looks) < 1 + (limit_s is None):
        return {}
    if (wait := _wait(record)) is not None:
        return _wait_sentence(record, wait, looks[-1][0])
    if not (limit_s is not None and record.paces) and not _is_hung(record):
        return {}
    what = "made a step" if record.newest_step else "made a step or printed anything"
    since, places = _quiet_since(record), places_sentence(record)
    sentence = f"no rank has {what} for {looks[-1][0] - since:.0f} s: {places}"
    outside = [rank for rank, place in places_of(record).items() if not place.waits]
    return {f"{since}": _with_stacks(record, sentence, outside or record.left)}


def sentence_at_failure(record: Record) -> str:
    """Who had not come to a collective when a rank lost patience; "" if all had, or nothing tells."""
    everyone, asked = range(record.world_size), record.own("asked")
    wait = find_wait(record.calls, record.world_size, everyone, is_over=True)
    if asked is None or wait is None:
        return ""
    # The latest calls of a rank that has ended are not known.
    accused = {*wait.missing, *wait.others}
    if not accused or accused & record.failures.keys() - _told(record):
        return ""
    return "".join(_wait_sentence(record, wait, asked.at).values())


def _wait_sentence(record: Record, wait: Wait, now: float) -> dict[str, str]:
    """Who waits for whom, and in which lines.

    The key is the same for each wait for the same place, as in each evaluation, unless one takes five times
    as long as another.
    """
    places, seconds = places_of(record), f"{now - wait.since:.0f} s"
    names = record.names(wait.missing)
    waited = f"rank {wait.waiting[0]} has waited {seconds}"
    if len(wait.waiting) > 1:
        few = f"ranks {', '.join(map(str, wait.waiting))}"
        who = few if len(wait.waiting) <= 2 * _NAMED else f"{len(wait.waiting)} ranks"
        waited = f"{who} have waited {seconds}"
    not_entered = f"not entered {wait.call}, for which {waited}"
    match wait.missing:
        case _ if wait.others:
            calls = ", ".join(f"{call} of {record.names(of)}" for call, of in wait.calls.items())
            where = places_sentence(record)
            sentence = f"the ranks have called different collectives: {calls}; {where}"
        case []:
            where = places_sentence(record)
            sentence = f"{waited} in {wait.call}, which all ranks have entered; {where}"
        case [rank] if _works(record, places.get(rank, Place()), rank):
            at = places[rank].text
            sentence = f"in {wait.call}, {waited} for {names}, which is at {at}."
        case [rank]:
            where = places[rank].clauses[0] if rank in places else "has finished"
            sentence = f"{names} has {not_entered}; it {where}."
        case several:
            sentence = f"{names} have {not_entered}; {places_sentence(record, several)}"
    differing = [ranks[0] for ranks in wait.calls.values()] if wait.others else []
    sentence = _with_stacks(record, sentence, wait.missing or differing)
    kind = [places[rank].function for rank in wait.missing if rank in places]
    length = int(math.log(max(1.0, (now - wait.since) / QUIET_S), BUSY_FACTOR))
    return {f"{wait.missing} {kind} {length}": sentence}


def _with_stacks(record: Record, sentence: str, ranks: Sequence[int]) -> str:
    """The sentence, and with --hang-timeout, which ends the job, also the stacks of these ranks."""
    limit_s = record.fact("began", "hang_timeout_s")
    for rank in ranks if limit_s is not None else ():
        if rank in record.stacks:
            text = record.stacks[rank]["text"].rstrip()
            sentence = f"{sentence}\nThe Python stack of rank {rank}:\n{text}"
    return sentence


def _wait(record: Record) -> Wait | None:
    """What the job waits for, by the ranks that have told their calls since the latest look began."""
    return find_wait(record.calls, record.world_size, _told(record))


def _told(record: Record) -> set[int]:
    """The ranks that have told their calls since the stacks were asked for."""
    asked = record.own("asked")
    told = record.latest["calls"].items()
    return {rank for rank, event in told if asked is not None and event.at >= asked.at}


def _quiet_since(record: Record) -> float:
    """When a rank has last shown that it lives, or since when one waits, as far as is known.

    A rank whose other calls go on does not wait: a thread of it does, as in a save. What the job prints
    counts until there are steps. With --hang-timeout, only steps and collectives count.
    """
    is_limited = record.fact("began", "hang_timeout_s") is not None
    signs = [pace.since for pace in record.paces.values()]
    called = called_at(record.calls)
    if not is_limited or not (signs or called):
        everyone = range(record.world_size)
        if (wait := find_wait(record.calls, record.world_size, everyone)) is not None:
            return max(wait.since, min(called[rank] for rank in wait.waiting))
        if not record.newest_step:
            signs = [event.at for event in record.latest["printed"].values()]
        signs += [record.last_saved_at, *record.saving.values()]
        signs += [event.at for event in record.done.values()]
    return max(record.began_at, *called.values(), *signs)


def _patience_s(record: Record) -> float:
    usual_s = next((pace.median_s for pace in record.paces.values()), 0.0)  # as long on all ranks
    if record.calls:  # who waits there is known
        usual_s = 0.0
    return record.fact("began", "hang_timeout_s") or max(QUIET_S, QUIET_STEPS * usual_s)


def _looks(record: Record) -> list[tuple[float, Mapping[int, Place]]]:
    """The latest two looks, without those before a rank has moved."""
    quiet_since = _quiet_since(record)
    return [look for look in record.looks if look[0] >= quiet_since]


def _works(record: Record, place: Place, rank: int) -> bool:
    """Whether a rank does something itself: it has moved, computed or saved between the latest two looks."""
    looks = _looks(record)
    if not place.frames or place.waits:
        return False
    if len(looks) < 2 or rank in record.saving:
        return rank in record.saving
    (before, first), (now, _) = looks
    was = first.get(rank, Place())
    return place.frames != was.frames or place.is_busy(was, now - before)


def _is_hung(record: Record) -> bool:
    """Whether no rank has moved between two looks, and one that the others may wait for does nothing.

    For ranks that wait elsewhere than in torch's collectives, as in its store, or in a script without torch.
    """
    looks = _looks(record)
    if len(looks) < 2:
        return False
    (before, first), (now, last) = looks
    if any(first.get(rank, Place()).frames != place.frames for rank, place in last.items()):
        return False
    there = [rank for rank, place in last.items() if not place.waits]
    is_idle = [not last[rank].is_busy(first[rank], now - before) for rank in there]
    if len(is_idle) == len(last) and not (record.newest_step and any(is_idle)):
        return False  # nobody waits for another rank: all compute, or a program makes no steps
    if now - _quiet_since(record) >= BUSY_FACTOR * _patience_s(record):
        return True
    return not record.saving and (any(is_idle) or not is_idle)


# --- where the ranks are ---


def places_of(record: Record) -> dict[int, Place]:
    """The places of the ranks that have not ended, by the stacks that they have sent."""
    return {rank: place_of(record.stacks.get(rank)) for rank in record.left}


def places_sentence(record: Record, ranks: Sequence[int] | None = None) -> str:
    """ "15 ranks wait in all_reduce (train.py:88); rank 11 on gpu03 is in load (data.py:40): open(path)."."""
    groups: dict[tuple[int, str, str], list[int]] = {}  # those that wait first, and the largest
    places = places_of(record)
    for rank in range(record.world_size) if ranks is None else ranks:
        key = (2, "has finished", "have finished")  # others may wait for it in vain
        if (place := places.get(rank)) is not None:
            key = (0 if place.waits else 1, *place.clauses)
        groups.setdefault(key, []).append(rank)
    clauses = []
    for key, members in sorted(groups.items(), key=lambda group: (group[0][0], -len(group[1]))):
        several = len(members) > _NAMED
        who = f"{len(members)} ranks" if several else ", ".join(map(record.name, members))
        clauses.append(f"{who} {key[1 if len(members) == 1 else 2]}")
    return "; ".join(clauses) + "."


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
