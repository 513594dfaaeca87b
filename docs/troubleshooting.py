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
_MOST_WORDS = 5  # of a message; a search engine needs no more

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

`mpiddp explain LOGFILE` names the root cause and the fix, from the log of mpiddp, mpirun, torchrun or Slurm
(`-`: stdin):

```console
$ echo 'ssh node2: Permission denied (publickey,password).' > train.log
$ mpiddp explain train.log
train.log:1: ssh node2: Permission denied (publickey,password).
ssh-key-refused: …
Fix: …
```

`mpiddp explain ID` prints one entry. See also
[error lines of mpiddp](failures.md#read-the-error-line-of-a-failed-job),
[hangs](failures.md#ranks-that-hang), [slow networks](clusters.md#fast-networks).
"""


def text() -> str:
    """The page."""
    links = ", ".join(f"[{name}](#{name})" for name in MOST_SEARCHED)
    parts = [_HEAD, f"Most searched: {links}."]
    for key, program in PROGRAMS.items():
        parts.append(f"\n## {program}")
        ours = [failure for failure in FAILURES if failure.id.partition("-")[0] == key]
        for failure in sorted(ours, key=lambda each: each.id):
            parts.append(
                f"\n### {failure.id}\n\n    {_looks_like(failure)}\n\n"
                f"{failure.cause}\n**Fix:** {failure.fix}"
            )
    return "\n".join(parts) + "\n"


def provoked() -> set[str]:
    """The texts that a function of tests/support/provoke_failures.sh provokes."""
    script = (_TESTS / "support" / "provoke_failures.sh").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z0-9]+-[a-z0-9.-]+)\(\) \{", script, re.MULTILINE))


def sources() -> dict[str, tuple[str, str]]:
    """The kind of the source of each other text, and where it is."""
    rows = [
        line.split("\t")
        for line in (_TEXTS / "sources.tsv").read_text(encoding="utf-8").splitlines()[1:]
    ]
    return {name: (kind, where) for name, kind, where in rows}


def _looks_like(failure: Failure) -> str:
    """The real program's words that the row finds."""
    names = sorted(_TEXTS.glob(f"{failure.id}.*"), key=lambda path: len(path.name))
    with names[0].open("rb") as file:  # its own text, or else a variant's
        line = next(each.line for each in explain_file(file).found if each.failure == failure)
    at = min(line.find(text) for text in failure.says if text in line)
    words = line[line.rfind(" ", 0, at + 1) + 1 :].split()
    return " ".join(words[:_MOST_WORDS]) + " …" * (len(words) > _MOST_WORDS)


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
