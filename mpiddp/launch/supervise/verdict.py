"""The verdict on an attempt: the rank that failed first, the sentence, the exit code.

Pure functions of a record of what happened. A job has succeeded when every rank has reported success.
mpirun's exit code counts only if no rank has reported: it is 0 after a killed daemon or a cut link, and 255
or 143 whatever the script returned.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from enum import IntEnum
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from mpiddp.errors import BAD_INPUT, DONE, FAILED, INTERRUPTED, STOPPED
from mpiddp.launch.monitor.ranks import EXPLAINS_S, Ranks, is_silent
from mpiddp.protocol.server import Message
from mpiddp.text import escaped

# Errors that a rank reports when another rank has ended. If that is the cause, the launcher notices the
# other's end at about the same time.
_CONSEQUENCE = re.compile(r"connection|by peer|broken pipe|gloo|nccl|store|socket", re.IGNORECASE)
_CONSEQUENCE_S = 0.3
_SILENCE_S = 15.0  # until the kernel reports that a host stopped answering
_AT_ONCE_S = 0.1  # a rank that ends without a signal does not end others this soon


class Stop(IntEnum):
    """Who has requested a stop of the ranks. A later request outweighs an earlier one."""

    NONE = 0
    TO_GROW = 1  # by the launcher, which restarts the job on more hosts
    BY_USER = 2
    AT_ONCE = 3  # by the user, without a save


class MpirunEnd(NamedTuple):
    """How mpirun ended.

    Args:
        name: its program.
        code: its exit code; -N if signal N killed it.
        rank_signal: the signal that killed a rank according to the code, "" if none did; None if this
            mpirun's code does not tell.
        was_ended: by this launcher.
    """

    name: str
    code: int
    rank_signal: str | None = None
    was_ended: bool = False


class StopRecord(NamedTuple):
    """The stop of an attempt: who requested it, and what went wrong after the request.

    Args:
        limit: the time limit that the ranks exceeded, "" if none.
        rank_failed: a rank failed after the user's request and before it was forced to end.
    """

    by: Stop = Stop.NONE
    limit: str = ""
    rank_failed: bool = False


class History(NamedTuple):
    """What happened in an attempt: all that its verdict depends on.

    Args:
        ended_because: the reason for which the launcher ended the job, "" if it did not.
        recorded: the errors that lost ranks have left in the files of torch's @record, by rank.
    """

    ranks: Ranks
    mpirun: MpirunEnd
    stop: StopRecord = StopRecord()
    ended_because: str = ""
    recorded: Mapping[int, str] = MappingProxyType({})


class FirstFailure(NamedTuple):
    """The rank that failed first, its own name of its host, and its error, "" if it has reported none."""

    rank: int
    host: str
    error: str


class Verdict(NamedTuple):
    """The launcher's exit code and the sentence for it.

    Args:
        first: None unless a rank is known to be the first that failed.
        is_complete: mpirun's own message about the end adds nothing.
    """

    code: int
    sentence: str = ""
    first: FirstFailure | None = None
    is_complete: bool = True


def verdict(history: History) -> Verdict:
    """The verdict. The first row that applies counts."""
    ranks, mpirun, stop = history.ranks, history.mpirun, history.stop
    first = first_failure(ranks)
    if ranks.all_stopped:
        return Verdict(STOPPED, "stopped on request.")
    if history.ended_because:
        return Verdict(FAILED, f"{_early_ends(ranks)}{history.ended_because}")
    if stop.rank_failed and first and _has_reason(first, ranks):
        return _of_failure(history, first)
    if stop.by >= Stop.BY_USER and not (ranks.all_done and ranks.supports_stop):
        return Verdict(INTERRUPTED, _interruption(stop))
    if ranks.all_done:
        return _after_success(ranks, mpirun)
    has_said_why = first is not None and first.kind == "failed"
    if mpirun.code < 0 and not mpirun.was_ended and not has_said_why:
        return _by_mpirun(mpirun)
    if first is not None:
        return _after_early_ends(ranks, first, _of_failure(history, first))
    if mpirun.code == DONE and not ranks.started:
        sentence = "the job failed: mpirun ended, but no rank ever reported."
        return Verdict(FAILED, sentence, is_complete=False)
    # Ranks that refuse may not report.
    if mpirun.code in (BAD_INPUT, STOPPED) and not ranks.started:
        return Verdict(mpirun.code, is_complete=False)
    return _by_mpirun(mpirun)


def first_failure(ranks: Ranks) -> Message | None:
    """The failure that caused the others.

    A rank that vanished takes precedence over the broken connections of its peers, and a silent host
    stopped answering long before it was noticed. A script that has failed may still be ending while the
    others' commands have ended because of it.
    """
    began = partial(_began, ranks)
    first = min(ranks.failures.values(), key=began, default=None)
    if first is None:
        return None
    scripts = [each for rank, each in ranks.script_failures.items() if rank not in ranks.done]
    causes = [each for each in scripts if 0 <= first.at - each.at <= EXPLAINS_S]
    return min([first, *causes], key=began)


def host_at_fault(history: History) -> str:
    """The host that has ended the attempt, by its name in the request; "" for none, or if it may be another.

    A script's own error is no fault of its host.
    """
    ranks = history.ranks
    if history.ended_because:
        missing = {ranks.hosts[rank] for rank in ranks.missing}
        return missing.pop() if len(missing) == 1 and len(ranks.missing) < ranks.world_size else ""
    first = first_failure(ranks)
    if first is None or not _was_killed(first):
        return ""
    is_alone = is_silent(first) or len(_lost_with(ranks, first)) == 1
    return ranks.hosts[first.rank] if is_alone else ""


def says_cause(history: History) -> bool:
    """Whether the verdict names what precedes every error: a lost host, or ranks that had ended."""
    first = first_failure(history.ranks)
    return first is not None and (is_silent(first) or bool(_ends_before(history.ranks, first)))


def killed_first(history: History) -> int | None:
    """The rank that failed first, if a signal may have ended it or a process of it; else None."""
    first = first_failure(history.ranks)
    if first is None or is_silent(first):
        return None
    is_killed = first.kind == "lost" or first.facts["code"] == 128 + signal.SIGKILL
    is_killed = is_killed or "illed" in first.facts["error"]  # a worker of a DataLoader
    return first.rank if is_killed else None


def signal_name(number: int) -> str:
    """ "SIGKILL". Most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _began(ranks: Ranks, message: Message) -> float:
    """The estimated time when this rank's failure began. The ends of its peers may overtake its report."""
    if message.kind == "lost":
        return message.at - (_SILENCE_S if message.facts["silent"] else 0.0)
    is_consequence = _is_of_connections(message) or _others_were_gone(ranks, message)
    if message.facts.get("signal") == signal.SIGTERM:  # an MPI's, after another rank's failure
        return message.at + _CONSEQUENCE_S
    began = ranks.claimed_at.get(message.rank, message.at)
    return began + _CONSEQUENCE_S if is_consequence else began


def _is_of_connections(failure: Message) -> bool:
    return bool(failure.facts["traceback"] and _CONSEQUENCE.search(failure.facts["error"]))


def _others_were_gone(ranks: Ranks, failure: Message) -> bool:
    """Whether ranks vanished before the process of this one had ended, so that no mpirun ended them for it.

    Its script may have caught the error of a connection, and left with an exit code.
    """
    if failure.facts["traceback"]:
        return False
    ended_at = ranks.gone_at.get(failure.rank, float("inf"))
    return any(each.kind == "lost" and each.at < ended_at for each in ranks.failures.values())


def _has_reason(first: Message, ranks: Ranks) -> bool:
    """Whether a rank failed while it saved and stopped, rather than being ended by the request."""
    if first.kind != "failed" or first.rank not in ranks.supports_stop:
        return False
    return bool(first.facts["error"]) or first.facts["code"] == BAD_INPUT


def _interruption(stop: StopRecord) -> str:
    if stop.limit:
        return f"interrupted: {stop.limit}; the job was killed."
    return "interrupted: the job was stopped."


def _after_success(ranks: Ranks, mpirun: MpirunEnd) -> Verdict:
    """The verdict after every rank has reported success. Only native code still ran then.

    Open MPI's exit code proves that a rank was killed by a signal. The others' may have another cause.
    """
    if mpirun.code == DONE or mpirun.was_ended:
        return Verdict(DONE)
    if ranks.replaced:
        sentence = f"{_early_ends(ranks)}{_cause(mpirun)}."
        return Verdict(FAILED, sentence, is_complete=False)
    if name := mpirun.rank_signal:
        sentence = f"all ranks finished, but one was killed by {name} while its process ended."
        return Verdict(FAILED, sentence)
    sentence = f"all ranks finished, but {_cause(mpirun)} afterwards."
    return Verdict(DONE, sentence, is_complete=False)


def _by_mpirun(mpirun: MpirunEnd) -> Verdict:
    """The verdict if mpirun's end is all that is known."""
    return Verdict(FAILED, f"the job failed: {_cause(mpirun)}.", is_complete=False)


def _cause(mpirun: MpirunEnd) -> str:
    if mpirun.code < 0:
        return f"{mpirun.name} was killed by {signal_name(-mpirun.code)}"
    if mpirun.rank_signal:
        return f"a rank was killed by {mpirun.rank_signal}"
    return f"{mpirun.name} ended with exit code {mpirun.code}"


def _of_failure(history: History, first: Message) -> Verdict:
    ranks = history.ranks
    error = str(first.facts.get("error", ""))
    # Such an error may name another rank.
    names_culprit = first.facts.get("is_verdict", False)
    failure = None if names_culprit else FirstFailure(first.rank, ranks.host_of(first.rank), error)
    if first.kind == "failed" and first.facts["code"] in (BAD_INPUT, STOPPED):
        return Verdict(first.facts["code"], _unprinted_error(ranks, first), failure)
    others = " The other ranks were stopped." if ranks.world_size > 1 else ""
    if first.kind == "failed":
        sentence, newline, table = _failed(ranks, first).partition("\n")
        return Verdict(FAILED, f"{sentence}{others}{newline}{table}", failure)
    if first.facts["silent"]:
        return Verdict(FAILED, f"{_silent_host(ranks, first)}{others}", failure)
    name, rank_signal = ranks.name(first.rank), history.mpirun.rank_signal
    if recorded := history.recorded.get(first.rank):
        return Verdict(FAILED, f"{name} failed first: {_first_line(recorded)}.{others}", failure)
    if first.rank in ranks.in_mpi_init and rank_signal in ("", None, "SIGABRT"):
        sentence = f"MPI_Init failed in {name}. What the MPI has written above says why.{others}"
        return Verdict(FAILED, sentence, failure, is_complete=False)
    if rank_signal:
        return Verdict(FAILED, f"{name} was killed by {rank_signal}.{others}", failure)
    if rank_signal == "" and len(hosts := _lost_with(ranks, first)) > 1:
        sentence = (
            f"the ranks on {', '.join(hosts)} ended at the same moment without an error, as when "
            "the MPI daemon on one of these hosts is killed."
        )
        return Verdict(FAILED, sentence, failure, is_complete=False)
    sentence = (
        f"{name} ended first, without an error: it was killed, crashed in native code, or called "
        f"os._exit.{others}"
    )
    return Verdict(FAILED, sentence, failure, is_complete=False)  # mpirun may know which of these


def _after_early_ends(ranks: Ranks, first: Message, found: Verdict) -> Verdict:
    """The verdict on a failure, after the ranks that ended without an error: they may be its cause."""
    if found.code != FAILED or is_silent(first):
        return found
    return found._replace(sentence=f"{_ends_before(ranks, first)}{found.sentence}")


def _ends_before(ranks: Ranks, first: Message) -> str:
    """As `_early_ends`. A script's normal end counts if the failure may be a consequence of it."""
    finished = [
        rank for rank, at in ranks.done.items() if at <= first.at and rank not in ranks.exited
    ]
    if early := _early_ends(ranks, first.at):
        return early
    if not finished or first.kind != "failed" or not _is_of_connections(first):
        return ""
    return f"{ranks.names(sorted(finished))} finished. Then "


def _early_ends(ranks: Ranks, before: float = float("inf")) -> str:
    """A sentence that names the ranks that ended early, "" for none. Another sentence follows."""
    early = sorted(rank for rank in ranks.exited if ranks.done[rank] <= before)
    exits = [rank for rank in early if rank not in ranks.replaced]
    programs = [rank for rank in early if rank in ranks.replaced]
    sentence = (
        f"{ranks.names(exits)} ended early, with exit code 0 (os._exit). Then " if exits else ""
    )
    if programs:
        sentence += f"{ranks.names(programs)} ended as another program (os.exec). Then "
    return sentence


def _failed(ranks: Ranks, first: Message) -> str:
    """A rank has reported its failure: its error, and where its traceback is."""
    error, log = first.facts["error"], ranks.logs.get(first.rank)
    if first.facts["is_verdict"]:
        return str(error)
    if number := first.facts.get("signal"):
        return f"{ranks.name(first.rank)} was killed by {signal_name(number)}."
    if not first.facts["traceback"]:
        messages = f": {error}" if error else ""
        code = first.facts["code"]
        return f"{ranks.name(first.rank)} ended first, with exit code {code}{messages}."
    where = f" (its traceback: {escaped(log)})" if log else ""
    return f"{ranks.name(first.rank)} failed first: {_first_line(error)}{where}."


def _silent_host(ranks: Ranks, first: Message) -> str:
    host = ranks.host_of(first.rank)
    silent = [rank for rank, message in ranks.failures.items() if is_silent(message)]
    there = sorted(rank for rank in silent if ranks.host_of(rank) == host)
    names = f"rank{'s' if len(there) > 1 else ''} {', '.join(map(str, there))}"
    return f"lost {host} ({names}): the host stopped answering."


def _unprinted_error(ranks: Ranks, refusal: Message) -> str:
    """The error of a rank that refused, "" if `errors.print_from_one_rank` has printed it on a rank."""
    refused = (rank for rank, message in ranks.failures.items() if message.kind == "failed")
    if any(ranks.hosts.index(ranks.hosts[rank]) == rank for rank in refused):
        return ""
    return str(refusal.facts["error"])


def _lost_with(ranks: Ranks, first: Message) -> list[str]:
    """The hosts of the ranks that vanished together with `first`, in the order of their ranks."""
    lost = [
        rank
        for rank, message in sorted(ranks.failures.items())
        if _was_killed(message) and message.at - first.at < _AT_ONCE_S
    ]
    return list(dict.fromkeys(ranks.host_of(rank) for rank in lost))


def _was_killed(message: Message) -> bool:
    """Whether a rank has ended without a word of its own: it, or its script, was killed or has crashed."""
    return message.kind == "lost" or bool(message.facts.get("signal"))


def _first_line(error: str) -> str:
    return error.strip().partition("\n")[0].rstrip(".")
