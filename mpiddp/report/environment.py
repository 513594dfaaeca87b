"""Where a run ran: the record of its newest start, RUN/starts/start_0001.json, and what differs between runs.

mpiddp/train/run_record.py writes it. Another program may have, so a value of another type is shown as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpiddp.report.html import by_run, details, letter, pre
from mpiddp.report.read import UNKNOWN, Run
from mpiddp.text import counted

_NAMES = {
    "command": "command",
    "folder": "folder",
    "started_by": "started by",
    "placement": "ranks by the hostfile",
    "python": "Python",
    "system": "system",
}
# These variables are a job's or a login's own, so they differ between any two runs.
_OF_ONE_JOB = (
    *("MPIDDP_", "OMPI_", "PMIX_", "PRTE_", "PMI", "HYDRA_", "MPI_LOCAL", "SLURM_", "PBS_", "LSB_"),
    *("SSH_", "XDG_", "TMPDIR", "PWD", "OLDPWD", "SHLVL", "MASTER_PORT", "_"),
)
_VARIABLE, _PACKAGE = "variable ", "package "


def environment(runs: Sequence[Run]) -> str:
    """The environment of one run, or of several what differs; "" if no run has a record of it."""
    if not any(run.start_record for run in runs):
        return ""
    facts = [_facts(run.start_record) for run in runs]
    rows = {
        name: [each.get(name, UNKNOWN) for each in facts]
        for name in dict.fromkeys(name for each in facts for name in each)
    }
    if len(runs) == 1:
        variables = {name: cells for name, cells in rows.items() if name.startswith(_VARIABLE)}
        packages = {name: cells for name, cells in rows.items() if name.startswith(_PACKAGE)}
        first = {name: rows[name] for name in rows if name not in {**variables, **packages}}
        return (
            by_run(first)
            + _changes(runs)
            + (details(counted(len(packages), "package"), by_run(packages)) if packages else "")
            + (details(counted(len(variables), "variable"), by_run(variables)) if variables else "")
        )
    differ = {
        name: cells
        for name, cells in rows.items()
        if len(set(cells)) > 1 and not name.removeprefix(_VARIABLE).startswith(_OF_ONE_JOB)
    }
    return (by_run(differ) or "<p>Nothing differs.</p>") + _changes(runs)


def _facts(record: dict[str, Any]) -> dict[str, str]:
    found = {
        shown: str(record[name]) for name, shown in _NAMES.items() if record.get(name) is not None
    }
    git = _object(record, "git")
    if "commit" in git:
        found["git commit"] = str(git["commit"])
        found["changed since"] = "yes" if git.get("diff") else "no"
    for kind, name in ((_PACKAGE, "packages"), (_VARIABLE, "environment")):
        found |= {f"{kind}{each}": str(value) for each, value in _object(record, name).items()}
    return found


def _changes(runs: Sequence[Run]) -> str:
    """What differed from the git commit, of each run that had changes."""
    found = []
    for index, run in enumerate(runs):
        if diff := str(_object(run.start_record, "git").get("diff") or ""):
            whose = f"{letter(index)}: " if len(runs) > 1 else ""
            found.append(details(f"{whose}changes since the commit", pre(diff)))
    return "".join(found)


def _object(record: dict[str, Any], name: str) -> dict[str, Any]:
    value = record.get(name)
    return value if isinstance(value, dict) else {}
