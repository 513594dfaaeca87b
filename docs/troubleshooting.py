"""The page of known failures, from the table that holds them.

python -m docs.troubleshooting     # writes troubleshooting.md
"""

from __future__ import annotations

import re
from pathlib import Path

from mpiddp.explain.explain import explain_file
from mpiddp.explain.failures import FAILURES, PROGRAMS, Failure

PAGE = Path(__file__).with_suffix(".md")
_TESTS = Path(__file__).parent.parent / "tests"
_TEXTS = _TESTS / "data" / "failures"

# The messages of torch, NCCL, MPI and ssh that people search for most: those that fill public issue trackers.
MOST_SEARCHED = (
    *("cuda-out-of-memory", "nccl-timeout", "nccl-unnamed-error", "torch-store-unreachable"),
    *(
        "torch-address-in-use",
        "system-rank-ended",
        "cuda-device-side-assert",
        "cuda-invalid-device",
    ),
    *(
        "nccl-duplicate-gpu",
        "torch-unused-parameters",
        "torch-variable-missing",
        "system-shared-memory",
    ),
    *("torch-state-dict-keys", "torch-without-cuda", "openmpi-slots", "openmpi-daemon-missing"),
    *("mpi-host-not-started", "ssh-key-refused", "ssh-host-key-unknown", "gloo-not-connected"),
)

_HEAD = """\
# Troubleshooting, by message

<!-- Written by `python -m docs.troubleshooting` from mpiddp/explain/failures. Change it there. -->

A job failed, and you have its log, of mpiddp, mpirun, torchrun or Slurm:

```console
$ echo 'ssh node2: Permission denied (publickey,password).' > train.log
$ mpiddp explain train.log
train.log:1: ssh node2: Permission denied (publickey,password).
ssh: The host does not accept this user's key.
Fix:  ssh-copy-id NODE on the host that runs mpirun. Check the user's name; ssh -v NODE shows the keys.
More: docs/troubleshooting.md#ssh-key-refused
```

It names the root cause, what fixes it, and the entry below. `-` reads stdin. The exit code is 0 if a failure
is explained, and 1 if nothing failed or nothing is known.
What is only likely is called *usual* here. Replace NODE, NAME and PATH by yours.

| you have | look at |
|---|---|
| an exit code | [exit codes, with what to do](reference.md#exit-codes) |
| a line that begins with `mpiddp:` | [the verdict][verdict] |
| ranks that wait, and no message | [ranks that hang][hang], [ranks that do not join][join] |
| a job that is slower than it should be | [fast networks][networks], [one machine or several][sum] |
| a command of torchrun, DeepSpeed, … | [Migration](migration.md) |

[verdict]: failures.md#read-the-verdict-of-a-failed-job
[hang]: failures.md#ranks-that-hang
[join]: failures.md#ranks-that-do-not-join
[networks]: clusters.md#fast-networks
[sum]: parallelism.md#one-machine-or-several
"""


def text() -> str:
    """The page."""
    parts = [_HEAD, "## Most searched\n", "| message | entry |\n|---|---|"]
    rows = {failure.id: failure for failure in FAILURES}
    for name in MOST_SEARCHED:
        parts.append(f"| {rows[name].program}: `{rows[name].says[0]}` | [{name}](#{name}) |")
    for key, program in PROGRAMS.items():
        parts.append(f"\n## {program}")
        ours = [failure for failure in FAILURES if failure.id.partition("-")[0] == key]
        for failure in sorted(ours, key=lambda each: each.id):
            parts.append(
                f"\n### {failure.id}\n\n```text\n{_looks_like(failure)}\n```\n\n"
                f"{failure.cause}\n\n**Fix:** {failure.fix}"
            )
    return "\n".join(parts) + "\n"


def provoked() -> set[str]:
    """The texts that a function of tests/support/provoke_failures.sh provokes."""
    script = (_TESTS / "support" / "provoke_failures.sh").read_text()
    return set(re.findall(r"^([a-z0-9]+-[a-z0-9.-]+)\(\) \{", script, re.MULTILINE))


def sources() -> dict[str, tuple[str, str]]:
    """The kind of the source of each other text, and where it is."""
    rows = [line.split("\t") for line in (_TEXTS / "sources.tsv").read_text().splitlines()[1:]]
    return {name: (kind, where) for name, kind, where in rows}


def _looks_like(failure: Failure) -> str:
    """The line of the real program's text that the row finds."""
    names = sorted(_TEXTS.glob(f"{failure.id}.*"), key=lambda path: len(path.name))
    with names[0].open("rb") as file:  # its own text, or else a variant's
        return next(each.line for each in explain_file(file).found if each.failure == failure)


if __name__ == "__main__":
    PAGE.write_text(text())
