"""Problems with a run's folder that every rank raises, even if only one rank has them.

`Coordinator.all_or_none` ends the ranks. A script may catch an error and continue, so here each rank raises
the same exception.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from mpiddp.errors import JobFailed, NoAnswer, UserError
from mpiddp.runtime.job.coordinator import Coordinator

PATIENCE_S = 1800.0  # a rank may still evaluate, write, or read every byte of a checkpoint


@contextlib.contextmanager
def raised_by_all(coordinator: Coordinator, *, timeout_s: float = PATIENCE_S) -> Iterator[None]:
    """Run the body on every rank; it succeeds on all ranks or raises on all. All ranks must call this.

    Raises:
        UserError: the body has raised one on some rank.
        JobFailed: the body has raised one on some rank. It takes precedence, because a failure of a
            machine may cause what looks like bad input.
    """
    problem, is_failure = "", False
    try:
        yield
    except NoAnswer:  # the missing rank would be missing here as well
        raise
    except (UserError, JobFailed) as error:
        problem, is_failure = str(error), isinstance(error, JobFailed)
    answers = coordinator.all_gather_json((problem, is_failure), timeout_s=timeout_s)
    if any(text for text, _ in answers):
        kind = JobFailed if any(failed for _, failed in answers) else UserError
        raise kind(_sentences([text for text, _ in answers], coordinator)) from None


def _sentences(problems: list[str], coordinator: Coordinator) -> str:
    """Each distinct problem once, after the name of the first rank that has it unless all have it."""
    if len(set(problems)) == 1:
        return problems[0]
    first = {problem: problems.index(problem) for problem in problems if problem}
    return "\n".join(
        f"rank {rank} on {coordinator.hostnames[rank]}: {text}" for text, rank in first.items()
    )
