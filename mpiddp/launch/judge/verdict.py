"""The verdict on an attempt: the rank that failed first, the sentence, the exit code, the host at fault.

`verdict` is a function of the attempt's record (`launch.judge.events`). A job has succeeded when every rank
has reported success. mpirun's exit code counts only if no rank has reported: it is 0 after a killed daemon or
a cut link, and 255 or 143 whatever the script returned. The agent of each rank reports how the script ended.
So a rank that ends without a report has lost its agent, by a signal or with its host.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpiddp.errors import BAD_INPUT, DONE, FAILED, INTERRUPTED, STOPPED, fault
from mpiddp.launch.judge.events import (
    MPIRUN,
    MPIRUN_AT_END,
    MpirunEnd,
    Outcome,
    Record,
    Stop,
    is_silent,
)
from mpiddp.launch.judge.hangs import sentence_at_failure
from mpiddp.protocol.server import Event
from mpiddp.text import escaped, signal_name, size_text, with_fix

# An error that follows from the end of another rank may be reported this much before that end.
_CONSEQUENCE_S = 0.3
_LONGEST_ERROR = 1000  # characters of an error in the line; the traceback has all
_ENDS_S = 1.5  # a script that has closed its connections ends within this time
_AT_ONCE_S = 0.1  # if ranks end within this time, no rank has ended the others
_LOST_DAEMON = re.compile(
    r"(?:Remote daemon *:.* on node|Remote host:|Downstream from host"
    r"|Connection to(?= \S+ closed by)|Timeout, server(?= \S+ not responding)) +(\S+)"
)
# The last line of a command whose Python has lost another rank: it has no exception that could be asked.
_LOST_ANOTHER = re.compile(r"torch\.distributed\.Dist\w*Error:|third_party/gloo/")
_MOST_SEARCHED = 64  # ranks whose last lines are searched for a known cause: more take seconds
HUNG_UP = "the terminal has hung up (SIGHUP)"
_WAS_NOT_ASKED = ". Its script had not called mpiddp.should_stop(), so it was not asked to save"
_FORGED = "without its proof: somebody on the network writes into it"
_CHECK = "mpiddp doctor, which checks the hosts"
PREEMPTED = "the job was preempted before it began."


def verdict(record: Record) -> Outcome:
    """The verdict, with the known cause of a failure."""
    end = record.act("mpirun")  # None if the agents wait for the next attempt
    mpirun = MpirunEnd(**end.facts) if end else MpirunEnd("mpirun", DONE, was_ended=True)
    first = _first_failure(record)
    judged = _judge(record, mpirun, first)
    sentence, newline, rest = judged.sentence.partition("\n")
    if sentence and judged.code != DONE:
        sentence += _files(record)
    outcome = judged._replace(
        # It quotes what a rank has printed.
        sentence=escaped(f"{sentence}{newline}{rest}", keep="\n"),
        stop=record.stop,
        announcement=record.announcement,
        made_steps=record.made_steps,
        gpus=[{"rank": rank, **gpu.summary} for rank, gpu in sorted(record.gpus.items())],
        num_failed_saves=len(record.failed_saves),
        written=_written(record),
    )
    return _with_cause(record, outcome, first) if outcome.code == FAILED else outcome


def may_be_preempted(record: Record) -> bool:
    """Whether SIGTERM may have ended the ranks, or their start. A scheduler signals ranks, and not the launcher."""
    first = _first_failure(record)
    if not record.left or record.fact("end", "why"):
        return False
    if first is None or (first.kind == "lost" and not is_silent(first)):
        return True
    return first.facts.get("signal") == signal.SIGTERM


def _first_failure(record: Record) -> Event | None:
    """The failure that began first, as far as the record tells."""
    failures = record.failures.values()
    return min(failures, key=lambda failure: _began(record, failure), default=None)


def _with_cause(record: Record, outcome: Outcome, first: Event | None) -> Outcome:
    """The outcome with the known cause of a failure. `first` failed first, as far as the record tells."""
    culprit = first if outcome.rank is not None else None
    if culprit and (sentence := _lack_of_memory(record, culprit)):
        # The host is not at fault, because the job needs more memory than it was given.
        return outcome._replace(known_cause=sentence, host_at_fault="")
    if outcome.names_event:
        return outcome
    least = MPIRUN_AT_END
    if outcome.is_complete:  # mpirun's text only says that a rank has ended
        least = MPIRUN if culprit is None else 0
    tails = record.latest["tail"]
    failed = sorted(record.failures, key=lambda rank: _began(record, record.failures[rank]))
    nearest = dict.fromkeys([MPIRUN, MPIRUN_AT_END, *failed, *tails])
    searched = [rank for rank in nearest if rank in tails and rank >= least][:_MOST_SEARCHED]
    printed = {rank: tails[rank].facts["lines"] for rank in tails if rank in searched}
    blames, sentence = "", ""
    try:
        if culprit or printed:
            here = record.fact("began", "here")
            is_elsewhere = culprit is not None and culprit.rank not in here
            other_host = record.host_of(culprit.rank) if culprit and is_elsewhere else ""
            blames, sentence = known_cause(culprit, printed, other_host)
    except (
        Exception
    ) as error:  # it loads the table: the installation may have changed, or no open file is left
        sentence = f"no known cause was looked for: {fault(error)}."
    if culprit and blames == "host":
        outcome = outcome._replace(host_at_fault=record.hosts[culprit.rank])
    if blames == "another rank":
        # NCCL's timeout kills a rank that has waited, so its host is not at fault.
        outcome = outcome._replace(host_at_fault="")
        sentence = sentence_at_failure(record) or sentence
    return outcome._replace(known_cause=sentence)


def _judge(record: Record, mpirun: MpirunEnd, first: Event | None) -> Outcome:
    """The verdict by the first row that applies. `first` failed first."""
    stop, end = record.act("stop"), record.act("end")
    # A request after a failure explains nothing, unless a scheduler has sent SIGTERM to the rank as well.
    was_signalled = first is not None and first.facts.get("signal") == signal.SIGTERM
    is_after_failure = stop and end and end.at < stop.at and not was_signalled
    is_requested = record.stop >= Stop.BY_USER and not is_after_failure
    # Ranks that have less to do may end before the request, so one rank that has stopped is enough.
    all_done = not record.left
    if all_done and record.latest["stopped"]:
        # An MPI that has lost a daemon sends SIGTERM to the other ranks.
        daemon = _lost_daemon(record) if record.stop is Stop.NONE else None
        if daemon is None:
            return Outcome(STOPPED, "stopped on request.")
        host, lost = record.hosts[daemon], f"the MPI daemon on {record.host_of(daemon)} was lost."
        return Outcome(FAILED, lost, is_complete=False, host_at_fault=host)
    if why := record.fact("end", "why"):
        has_all = len(record.missing) == record.world_size
        host = "" if has_all else _only_host(record, record.missing)
        left = _left_early(record)
        return Outcome(FAILED, f"{left}{why}", host_at_fault=host, names_event=bool(left))
    if record.act("preempted") and not record.fact("end", "overdue"):
        if not record.made_steps and record.stop is not Stop.AT_ONCE:
            return Outcome(STOPPED, PREEMPTED)
        if not record.latest["supports_stop"]:
            return Outcome(INTERRUPTED, f"interrupted: the job was preempted{_WAS_NOT_ASKED}.")
    if is_requested and (hang := record.fact("stop", "hang")):
        return Outcome(INTERRUPTED, f"interrupted: the job hung, and was stopped: {hang}")
    if is_requested and record.fact("end", "failed") and first and first.kind == "failed":
        # The rank failed while it saved and stopped: the request has not ended it.
        has_reason = bool(first.facts["error"]) or first.facts["code"] == BAD_INPUT
        if has_reason and first.rank in record.latest["supports_stop"]:
            return _of_failure(record, mpirun, first)
    # All ranks may have ended before the request, while their output was still read.
    was_over = all_done and all(end.at < stop.at for end in record.done.values() if stop)
    if is_requested and not (all_done and (was_over or record.latest["supports_stop"])):
        clause = record.fact("end", "overdue")
        what = f"{clause}; the job was killed" if clause else "the job was stopped"
        if record.fact("stop", "reason") == HUNG_UP:
            nohup = "With nohup before its command, a job outlives its terminal"
            what = f"{HUNG_UP}, and {what}. {nohup}"
        elif not clause and not record.latest["supports_stop"]:
            what += _WAS_NOT_ASKED
            if len(record.latest["started"]) < record.world_size:
                what = "the job was stopped before all its ranks had started"
        return Outcome(INTERRUPTED, f"interrupted: {what}.")
    if all_done:
        return Outcome(DONE)  # whatever mpirun's exit code is
    if first is not None:
        if outcome := _not_started(record, mpirun, first):
            return outcome
        # An mpirun that is killed ends its ranks by a signal, so no signal of a rank is the cause.
        has_said_why = first.kind == "failed" and not first.facts.get("signal")
        if mpirun.code >= 0 or mpirun.was_ended or has_said_why:
            return _of_failure(record, mpirun, first)
    # Ranks that refuse may end without a report.
    if not record.latest["started"] and mpirun.code in (BAD_INPUT, STOPPED):
        return Outcome(mpirun.code, is_complete=False)
    cause, fix = f"{mpirun.name} ended with exit code {mpirun.code}", ""
    if mpirun.code < 0:
        cause = f"{mpirun.name} was killed by {signal_name(-mpirun.code)}"
    elif mpirun.rank_signal:
        cause = f"a rank was killed by {mpirun.rank_signal}"
    elif mpirun.code == DONE and not record.latest["started"]:
        cause = "mpirun ended, but no rank ever reported"
    elif not record.latest["started"] and len(record.fact("began", "here")) < record.world_size:
        cause, fix = f"{cause} before any rank had started", _CHECK
    return Outcome(FAILED, with_fix(f"the job failed: {cause}.", fix), is_complete=False)


def _files(record: Record) -> str:
    """Sentences about the files that a rank has torn, and about the one that was written last, or ""."""
    wrote = record.latest["wrote"]
    torn = {rank: str(event.facts["torn"]) for rank, event in wrote.items() if event.facts["torn"]}
    for rank, event in record.latest["saving"].items():
        # An agent that is killed with its script has told the file before.
        if event.facts["active"] and rank not in (wrote.keys() | record.done.keys()):
            torn.setdefault(rank, str(event.facts.get("path", "")))
    texts = [
        f" {record.name(rank)} was writing {torn[rank]}, which is torn."
        for rank in sorted(torn)
        if torn[rank]
    ]
    last = max(
        (event for event in wrote.values() if event.facts["path"] not in ("", *torn.values())),
        key=lambda event: event.at - event.facts["age_s"],
        default=None,
    )
    if last is not None:
        step = f" (step {last.facts['step']})" if last.facts["step"] else ""
        texts.append(f" The file written last is {last.facts['path']}{step}.")
    return "".join(texts)


def _written(record: Record) -> str:
    """The file that was written last, by `torch.save` for example, and when; "" if there is none."""
    events = [event for event in record.latest["wrote"].values() if event.facts["path"]]
    last = max(events, key=lambda event: event.at - event.facts["age_s"], default=None)
    if last is None:
        return ""
    return f"{last.facts['path']} at {last.at - last.facts['age_s']:.0f}"  # the same name may be written again


def _not_started(record: Record, mpirun: MpirunEnd, first: Event) -> Outcome | None:
    """The verdict if a rank has ended before others had started; None if a signal may have ended it."""
    missing = [rank for rank in range(record.world_size) if rank not in record.latest["started"]]
    is_at_start = first.kind == "lost" and 0 < len(missing) < record.world_size
    if not is_at_start or mpirun.rank_signal or not mpirun.proves_signals or is_silent(first):
        return None
    host, others = "", record.names(missing)
    if mpirun.was_ended or mpirun.code < 0:  # the exit code says nothing
        why = f"{record.name(first.rank)} ended before {others} had started"
    else:
        why = f"{mpirun.name} could not start {others} (exit code {mpirun.code})"
        host = _only_host(record, missing)
    sentence = with_fix(f"{why}.", _CHECK)
    return Outcome(FAILED, sentence, is_complete=False, host_at_fault=host)


def _only_host(record: Record, ranks: Sequence[int]) -> str:
    """The host of these ranks, or "" if there are several."""
    hosts = {record.hosts[rank] for rank in ranks}
    return hosts.pop() if len(hosts) == 1 else ""


def _began(record: Record, failure: Event) -> float:
    """The estimated beginning of a rank's failure, because others may end before its report arrives."""
    if failure.kind == "lost":
        return float(failure.at - failure.facts["silent"])
    if failure.facts.get("passed"):  # an MPI's SIGTERM, after another rank's failure
        return failure.at + _CONSEQUENCE_S
    began = record.latest["claim"].get(failure.rank, failure).at
    return began + _CONSEQUENCE_S if _may_follow(failure) else began


def _may_follow(failure: Event) -> bool:
    """Whether a rank may have failed because another rank has ended."""
    return bool(failure.facts.get("follows"))


def _needed_another(record: Record, failure: Event) -> bool:
    """Whether the error of a rank, or the last line of its command, may follow from another rank's end."""
    if failure.kind != "failed" or failure.facts["error"]:
        return _may_follow(failure)
    tail = record.latest["tail"].get(failure.rank)
    return tail is not None and any(map(_LOST_ANOTHER.search, tail.facts["lines"][-1:]))


def _of_failure(record: Record, mpirun: MpirunEnd, first: Event) -> Outcome:
    """The verdict on a job whose rank has failed first, by its report or by the end of its agent."""
    facts, failures = first.facts, [failure for _, failure in sorted(record.failures.items())]
    # Exit code 2 is a refusal, as argparse's. But if the rank gives no error, and steps were made or other
    # ranks waited, it is a failure. A waiting rank may be killed after its claim and before its report.
    reported = {failure.rank for failure in failures if failure.kind == "failed"}
    claims = record.latest["claim"].keys() - reported
    is_amid = bool(record.made_steps or claims) or any(map(_may_follow, failures))
    is_refusal = facts.get("code") == BAD_INPUT and (facts["error"] or not is_amid)
    if facts.get("code") == STOPPED or is_refusal:
        return _of_own_end(record, first)
    # Ranks that ended without a report, or whose scripts a signal has killed.
    killed = [end for end in failures if end.kind == "lost" or end.facts.get("signal")]
    # After a script that a signal has killed, its MPI may have ended the agents of other ranks.
    ends = [end for end in killed if first.kind == "lost" or end.kind != "lost"]
    at_once = [end for end in ends if first in killed and end.at - first.at < _AT_ONCE_S]
    hosts = list(dict.fromkeys(record.host_of(end.rank) for end in at_once))
    others, is_complete, daemon = _others(record, first), True, _lost_daemon(record)
    before = _left_early(record, first.at, is_needed=_needed_another(record, first))
    # A person or a scheduler sends SIGTERM, so it is no fault of a host.
    is_own = len(hosts) == 1 and facts.get("signal") != signal.SIGTERM
    host_at_fault = record.hosts[first.rank] if is_own else ""
    if is_silent(first):
        before, sentence = "", _silence(record, first)
        host_at_fault = record.hosts[first.rank]
    elif first.kind == "failed":
        sentence = _report(record, first)
    elif first.facts.get("is_forged"):
        sentence = f"the connection of {record.name(first.rank)} brought a line {_FORGED}."
        host_at_fault = ""
    elif mpirun.rank_signal:
        sentence = f"{record.name(first.rank)} was killed by {mpirun.rank_signal}."
    elif len(hosts) == 1 and daemon is None:
        # mpirun's own message may say how the rank has ended.
        is_complete = False
        how = "it was killed, crashed in native code, or called os._exit."
        sentence = f"{record.name(first.rank)} ended first, without an error: {how}"
    else:
        is_complete, before, others = False, "", ""
        cause = "as when the MPI daemon on one of these hosts is killed"
        if daemon is not None:
            cause = f"because the MPI daemon on {record.host_of(daemon)} was lost"
            host_at_fault = record.hosts[daemon]
        where = ", ".join(hosts)
        sentence = f"the ranks on {where} ended at the same moment without an error, {cause}."
    sentence, newline, table = sentence.partition("\n")
    sentence = f"{before}{sentence}{others}{newline}{table}"
    outcome = Outcome(FAILED, sentence, is_complete=is_complete, host_at_fault=host_at_fault)
    return _naming(record, first, outcome._replace(names_event=bool(before) or is_silent(first)))


def _naming(record: Record, first: Event, outcome: Outcome) -> Outcome:
    """The outcome with the rank that failed first, unless its error is a verdict on another rank."""
    if first.facts.get("is_verdict", False):
        return outcome
    return outcome._replace(rank=first.rank, host=record.host_of(first.rank))


def _others(record: Record, first: Event) -> str:
    """What has ended the other ranks: the same error as that of the first, which alone is shown, or a stop."""
    likes = {rank: claim.facts.get("like") for rank, claim in record.latest["claim"].items()}
    like = likes.pop(first.rank, "")
    same = [rank for rank in sorted(likes) if like and likes[rank] == like]
    if same:
        are_all = len(same) == record.world_size - 1
        named = "all other ranks." if are_all else f"{record.names(same)}. The others were stopped."
        return f" The same error ended {named}"
    return " The other ranks were stopped." if record.world_size > 1 else ""


def _of_own_end(record: Record, first: Event) -> Outcome:
    """The verdict on a rank that was the first to stop, or to refuse its input."""
    code, error = first.facts["code"], str(first.facts.get("error", ""))
    has_said_why = error or first.rank in record.latest["tail"]
    if code == STOPPED:  # the other ranks may have ended in the same way
        stopped = {rank for rank, end in record.failures.items() if end.facts.get("code") == code}
        has_said_why = error or len(stopped | record.done.keys()) == record.world_size
    sentence = (
        f"{record.name(first.rank)} ended first, with exit code {code}.{_others(record, first)}"
    )
    return _naming(record, first, Outcome(code, error if has_said_why else sentence))


def _silence(record: Record, first: Event) -> str:
    host = record.host_of(first.rank)
    silent = [rank for rank, end in sorted(record.failures.items()) if is_silent(end)]
    there = [str(rank) for rank in silent if record.host_of(rank) == host]
    numbers = f"rank{'s' if len(there) > 1 else ''} {', '.join(there)}"
    return f"lost {host} ({numbers}): the host stopped answering."


def _report(record: Record, first: Event) -> str:
    facts, name, error = first.facts, record.name(first.rank), str(first.facts["error"])
    if facts.get("is_verdict", False):
        return error
    if number := facts.get("signal"):
        return f"{name} was killed by {signal_name(number)}."
    if facts["traceback"]:
        file = record.latest["log"].get(first.rank)
        where = f" (its traceback: {escaped(file.facts['path'])})" if file else ""
        return f"{name} failed first: {_in_one_line(error)}{where}."
    reason = f": {_in_one_line(error)}" if error.strip() else ""
    return f"{name} ended first, with exit code {facts['code']}{reason}."


def _in_one_line(error: str) -> str:
    """The first line of an error, with the error of a DataLoader's worker if it wraps one."""
    head, *rest = filter(None, map(str.strip, error.splitlines()))
    head = f"{head[:_LONGEST_ERROR]}…" if len(head) > _LONGEST_ERROR else head
    if any("Traceback (most recent call last)" in line for line in rest):
        return f"{head.rstrip('.:')}: {rest[-1].rstrip('.')}"
    return f"{head} {rest[0]}".rstrip(".") if head.endswith(":") and rest else head.rstrip(".")


def _lost_daemon(record: Record) -> int | None:
    """A rank on the host whose MPI daemon was lost, if Open MPI, Intel MPI or their ssh says so."""
    tail = record.latest["tail"].get(MPIRUN_AT_END)
    text = "\n".join(tail.facts["lines"]) if tail else ""
    if not (match := _LOST_DAEMON.search(text)):
        return None
    ranks = range(record.world_size)
    return next((n for n in ranks if match[1] in (record.hosts[n], record.host_of(n))), None)


def _left_early(record: Record, before: float = float("inf"), *, is_needed: bool = False) -> str:
    """The beginning of a sentence, which names the ranks that left early without an error, or "".

    With `is_needed`, the rank that failed was waiting for another rank, so every rank that was done counts,
    also if the launcher has seen its end a little later than the rank that failed.
    """
    ends = [end for end in record.done.values() if end.kind == "exited" and end.at <= before]
    how = " (os._exit)" if ends else ""
    if is_needed and not ends:
        ends = [end for end in record.done.values() if end.at <= before + _ENDS_S]
    early = record.names(sorted(end.rank for end in ends))
    return f"{early} ended early, with exit code 0{how}. Then " if early else ""


# --- known causes ---


def _lack_of_memory(record: Record, first: Event) -> str:
    """A sentence if the kernel has killed processes for lack of memory, or "".

    Each rank's agent reports the kernel's count of its kills. If the agent was killed too, the agents of the
    other ranks on the host report it.
    """
    place, ends = f"of rank {first.rank}", [first]
    if first.kind == "lost":
        host = record.hosts[first.rank]
        place = f"on {record.host_of(first.rank)}"
        ends = [end for end in record.failures.values() if record.hosts[end.rank] == host]
    facts = next((end.facts for end in ends if end.facts.get("oom_kills")), None)
    if facts is None:
        return ""
    count, limit = facts["oom_kills"], facts["memory_limit"]
    killed = "a process" if count == 1 else f"{count} processes"
    full = f"its control group's limit of {size_text(limit)}" if limit else "its host's memory"
    return with_fix(
        f"the kernel has killed {killed} {place}, because {full} was reached (oom_kill).",
        "a smaller batch, fewer DataLoader workers, or more memory: mpiddp explain system-out-of-memory",
    )


def _push_of_missing(error: str) -> tuple[str, str]:
    """The path that an error misses, and the command that pushes it; "" if this host lacks it, too."""
    named = re.search(r"\[Errno 2\].*: b?(['\"])(.+?)\1$|can't open file (['\"])(.+?)\3", error)
    path = Path(named[2] or named[4]) if named else Path("/")
    try:
        whole, here = path.absolute(), Path.cwd()
        is_ours = whole.exists() and not Path.home().is_relative_to(whole.parent)
    except (OSError, RuntimeError, ValueError):
        return "", ""
    if not is_ours:
        return "", ""
    folder = str(whole if whole.is_dir() else whole.parent)
    if whole.is_relative_to(here):  # of this folder, its entry is enough
        entry = whole.relative_to(here).parts[:1]
        folder = "".join(entry) if (here / Path(*entry)).is_dir() else ""
    return str(path), " ".join(
        ["mpiddp hosts push HOSTFILE", *([shlex.quote(folder)] if folder else [])]
    )


def known_cause(
    first: Event | None, printed: Mapping[int, Sequence[str]], other_host: str = ""
) -> tuple[str, str]:
    """Whom the table of failures blames for the end of the job, and the sentence of its row; "" if it has none.

    `printed` has the last lines on stderr, by rank. The words of the rank that failed first count before the
    words of the others. If it failed with an exception that is in no row, this exception is the cause.
    `other_host` is its host, if that is not this machine, which may have the file that is missing there.
    """
    from mpiddp.explain.explain import explain  # takes some 50 ms
    from mpiddp.explain.failures import Weight

    error = str(first.facts.get("error", "")) if first else ""
    words = [*error.splitlines(), *(printed.get(first.rank, ()) if first else ())]
    explanation = explain(words)
    weight = explanation.failure.weight if explanation else Weight.EXCEPTION
    if weight > Weight.CAUSE:
        if error and weight is Weight.EXCEPTION:
            return "", ""
        explanation = explain([*words, *(line for lines in printed.values() for line in lines)])
    if explanation is None or explanation.failure.weight > Weight.SYMPTOM:
        return "", ""
    row = explanation.failure
    # The error line above has the whole error, so quote only the words of the row in it.
    line = next((text for text in row.says if text in error), explanation.line)
    sentence = f'"{line}" has a known cause. {row.program}: {row.cause}'
    if other_host and row.id == "python-file-missing":
        path, fix = _push_of_missing(explanation.line)
        if fix:
            return row.blames, with_fix(f"{path} is on this host, and not on {other_host}.", fix)
    fix = explanation.fix.replace("/path/to/python", sys.executable)  # all ranks run this one
    active = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX")
    if (
        sys.executable in fix
        and active
        and os.path.realpath(active) != os.path.realpath(sys.prefix)
    ):
        sentence += f" The active environment is another one, {active}."
    return row.blames, with_fix(sentence, fix)
