"""The page of known failures, from the table that holds them.

python -m docs.troubleshooting     # writes troubleshooting.md
"""

from __future__ import annotations

from pathlib import Path

from mpiddp.explain.failures import FAILURES, PROGRAMS

PAGE = Path(__file__).with_suffix(".md")

_HEAD = """\
# Troubleshooting, by message

<!-- Written by `python -m docs.troubleshooting` from mpiddp/explain/failures. Change it there. -->

`mpiddp explain LOGFILE` finds the first error, a known cause and its fix, in the log of mpiddp, mpirun,
torchrun or Slurm (`-`: stdin):

```console
$ echo 'node2: Permission denied (publickey,password).' > train.log
$ mpiddp explain train.log
train.log:1: node2: Permission denied (publickey,password).
ssh-key-refused: …
Fix: …
```

`mpiddp explain ID` prints one entry. See also
[error lines of mpiddp](failures.md#read-the-error-line).
"""


def text() -> str:
    """The page."""
    parts = [_HEAD.strip()]
    for key, program in PROGRAMS.items():
        parts.append(f"\n## {program}")
        ours = [failure for failure in FAILURES if failure.id.partition("-")[0] == key]
        for failure in sorted(ours, key=lambda each: each.id):
            parts.append(
                f"\n### {failure.id}\n\n    {failure.says[0]}\n\n{failure.cause}\n**Fix:** {failure.fix}"
            )
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
