"""Ranks that hang, and ranks that do not join, by the record of an attempt. Nothing here acts.

A hang is a collective of torch, or the forming of its group, that some ranks have entered and others have
not, for WAIT_S. About any other silence, such as an evaluation, a save or a wait in native code, a sentence
after QUIET_S only says that no rank has made a step, and where each rank is. With --hang-timeout, a silence
of that length ends the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mpiddp.launch.judge.calls import Wait, find_wait
from mpiddp.launch.judge.events import Record
from mpiddp.launch.judge.stacks import frames_of, place_of, stacks_of_script
from mpiddp.text import keys_by_value

WAIT_S = 60.0  # in a collective, until the ranks that have not entered it are named
QUIET_S = 300.0  # without a step, until the places of the ranks are printed
BETWEEN_LOOKS_S = 10.0  # from one question for stacks to the next
_NAMED = 4  # ranks of one place, and stacks below a sentence


class Hang(NamedTuple):
    """A sentence to print about a job that may hang."""

    about: str  # equal for waits at the same place, as in each evaluation: print one of them
    sentence: str
    stacks: str  # to print below it
    is_over: bool  # whether --hang-timeout is over, so that the job has to end


def next_look_at(record: Record, looked_at: float = 0.0, printed_at: float = 0.0) -> float:
    """When to ask the ranks for their stacks and their calls; infinity as long as no rank seems to wait.

    At `looked_at` a hang was found last, and at `printed_at` the job has last printed something.
    """
    asked, times = record.act("asked"), [_quiet_at(record, printed_at)]
    waits = filter(None, (record.wait, record.forming_wait))
    times += [_since(record, wait) + WAIT_S for wait in waits]
    at = min((at for at in times if at > looked_at), default=float("inf"))
    return at if asked is None else max(at, asked.at + BETWEEN_LOOKS_S)


def find_hang(record: Record, printed_at: float = 0.0) -> Hang | None:
    """The hang that the latest stacks and calls show, None if the job goes on."""
    asked, limit_s = record.act("asked"), record.fact("began", "hang_timeout_s")
    if asked is None:
        return None
    is_quiet = asked.at >= _quiet_at(record, printed_at)
    wait = find_wait(record.calls, record.world_size, _told(record)) or record.forming_wait
    is_over = is_quiet and limit_s is not None
    if wait is not None and (is_quiet or asked.at >= _since(record, wait) + WAIT_S):
        sentence = _wait_sentence(record, wait, asked.at)
        functions = [_place(record, rank).partition(" (")[0] for rank in wait.missing]
        stacks = _stacks_of(record, wait.missing or record.left)
        return Hang(f"{wait.missing} {functions} {is_quiet}", sentence, stacks, is_over)
    if not is_quiet:
        return None
    since = _quiet_since(record, printed_at)
    what = "made a step" if record.made_steps else "made a step or printed anything"
    sentence = f"no rank has {what} for {asked.at - since:.0f} s: {places_sentence(record)}"
    return Hang(f"{since}", sentence, _stacks_of(record, record.left) if is_over else "", is_over)


def sentence_at_failure(record: Record) -> str:
    """A sentence about the ranks that had not entered a collective when it timed out, or ""."""
    asked, everyone = record.act("asked"), range(record.world_size)
    wait = find_wait(record.calls, record.world_size, everyone, is_over=True)
    if asked is None or wait is None:
        return ""
    # A rank that has ended may have made calls that it has not reported.
    if {*wait.missing, *wait.others} & record.failures.keys() - _told(record):
        return ""
    return _wait_sentence(record, wait, asked.at)


# --- the beginning of a wait ---


def _quiet_at(record: Record, printed_at: float) -> float:
    """When the job is quiet. Without --hang-timeout, a job that has made no step is never quiet."""
    limit_s = record.fact("began", "hang_timeout_s")
    if limit_s is None and not record.made_steps:
        return float("inf")
    return _quiet_since(record, printed_at) + (limit_s or QUIET_S)


def _quiet_since(record: Record, printed_at: float) -> float:
    """When a rank last made a step, called a collective, began or ended a save, or ended itself.

    Before the first step, output of the job counts as well.
    """
    signs = [pace.since for pace in record.paces.values()]
    signs += [record.last_saved_at, *record.saving.values(), *record.called_at.values()]
    events = [*record.latest["joining"].values(), *record.done.values()]
    if not record.made_steps:
        signs.append(printed_at)
    return max(record.began_at, *signs, *(event.at for event in events))


def _since(record: Record, wait: Wait) -> float:
    """The beginning of this wait.

    As long as all waiting ranks make other collectives, only a thread of each waits, as in a background save.
    So the wait begins when one of them makes no more calls.
    """
    return max(wait.since, min(record.called_at.get(rank, 0.0) for rank in wait.waiting))


def _told(record: Record) -> set[int]:
    """The ranks that have reported their calls since they were asked for their stacks."""
    asked = record.act("asked")
    reports = record.latest["calls"].items()
    return {rank for rank, report in reports if asked is not None and report.at >= asked.at}


# --- in words ---


def _wait_sentence(record: Record, wait: Wait, now: float) -> str:
    """A sentence about the ranks that wait, and about the lines in which the missing ranks are."""
    if wait.others:
        calls = ", ".join(f"{call} of {record.names(of)}" for call, of in wait.calls.items())
        return f"the ranks have called different collectives: {calls}; {places_sentence(record)}"
    seconds, (first, *others) = f"{now - wait.since:.0f} s", wait.waiting
    waited = f"rank {first} has waited {seconds}"
    if others:
        few = f"ranks {', '.join(map(str, wait.waiting))}"
        who = few if len(wait.waiting) <= 2 * _NAMED else f"{len(wait.waiting)} ranks"
        waited = f"{who} have waited {seconds}"
    if not wait.missing:
        return f"{waited} in {wait.call}; {places_sentence(record)}"
    names, is_one = record.names(wait.missing), len(wait.missing) == 1
    sentence = f"{names} {'has' if is_one else 'have'} not entered {wait.call}, for which {waited}"
    if is_one and not record.forming:
        return f"{sentence}; it {_clauses(record, wait.missing[0])[0]}."
    return f"{sentence}; {places_sentence(record, [*wait.missing, *record.forming])}"


def places_sentence(record: Record, ranks: Sequence[int] | None = None) -> str:
    """Where the ranks are: "15 ranks are in step (train.py:88): all_reduce(x); rank 11 on gpu03 is in …"."""
    clauses, everyone = [], range(record.world_size)
    for (singular, plural), members in _groups(record, everyone if ranks is None else ranks):
        are_many = len(members) > _NAMED
        who = f"{len(members)} ranks" if are_many else ", ".join(map(record.name, members))
        clauses.append(f"{who} {singular if len(members) == 1 else plural}")
    return "; ".join(clauses) + "."


def _stacks_of(record: Record, ranks: Sequence[int]) -> str:
    """The Python stack of one rank of each place, the rarest places first, without threads of libraries."""
    firsts = [members[0] for _, members in _groups(record, ranks)]
    shown = [rank for rank in reversed(firsts) if _place(record, rank)][:_NAMED]
    texts = [(rank, stacks_of_script(record.stacks[rank]["text"])) for rank in shown]
    return "".join(f"\nThe Python stack of rank {rank}:\n{text}" for rank, text in texts)


def _groups(record: Record, ranks: Sequence[int]) -> list[tuple[tuple[str, str], list[int]]]:
    """The ranks with each pair of clauses about their place, the largest group first."""
    groups = keys_by_value({rank: _clauses(record, rank) for rank in ranks})
    return sorted(groups.items(), key=lambda group: -len(group[1]))


def _clauses(record: Record, rank: int) -> tuple[str, str]:
    """A clause about the place of this rank, and the same clause for several ranks."""
    if rank in record.done:
        return "has finished", "have finished"
    if place := _place(record, rank):
        return f"is in {place}", f"are in {place}"
    if record.stacks.get(rank, {}).get("text") == "":  # a command shows no line
        return "runs a command", "run a command"
    silent = "not answer: stopped, or stuck in native code"
    return f"does {silent}", f"do {silent}"


def _place(record: Record, rank: int) -> str:
    """The line of the script that a rank executes, or "" without one: it has sent no stack, or has ended."""
    stacks = record.stacks.get(rank)
    return "" if stacks is None or rank in record.done else place_of(stacks["text"])


def peer_sentences(record: Record, now: float) -> dict[str, str]:
    """A sentence about each rank that has waited for WAIT_S in torch's recv or send, by its place.

    It is no hang: the stages of a pipeline wait so for each other, and the wait has no number by which the other
    rank could be asked.
    """
    sentences = {}
    for rank, (since, peer) in sorted(record.peers.items()):
        if rank in record.left and now - since >= WAIT_S:
            other = peer["rank"]
            of_whom = {"recv": "from", "send": "to"}[peer["call"]] + f" rank {other}"
            place = place_of(peer["stack"])
            sentences[f"peer {rank} {place}"] = (
                f"{record.name(rank)} has waited {now - since:.0f} s in {peer['call']}"
                f"{f' {of_whom}' if other is not None else ''}: it is in {place}."
            )
    return sentences


def missing_sentence(record: Record, timeout_s: float) -> str:
    """A sentence that names the ranks that did not join, with the line that the first of them executes."""
    first, *others = missing = record.missing
    names = ", ".join(map(record.name, missing))
    owner = f"The last words of rank {first}" if others else "Its last words"
    started, stacks = record.latest["started"], record.stacks.get(first)
    frames = [] if stacks is None else frames_of(stacks["text"])
    lines = [frame for frame in frames if not frame.file.startswith("<frozen ")]  # import system
    if first not in started:
        words = "none; its Python has not started."
    elif first in record.done:
        words = "none; it has ended, with exit code 0."
    elif stacks is None:
        pid = started[first].facts["pid"]
        words = f"none; it started (pid {pid}) but does not answer: it is stopped, or stuck in native code."
    elif lines:
        words = "in {}, line {}, in {}: {}".format(*lines[-1])
    else:
        words = "none; its Python stack shows no line of a script."
    return (
        f"only {record.world_size - len(missing)} of {record.world_size} ranks joined in {timeout_s:g} s. "
        f"Missing: {names}. {owner}: {words}"
    )
