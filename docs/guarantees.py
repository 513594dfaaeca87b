"""The page of what a user can rely on, from the docstrings of the tests that keep it.

python -m docs.guarantees     # writes guarantees.md
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

PAGE = Path(__file__).with_suffix(".md")
_TESTS = Path(__file__).parent.parent / "tests" / "promises"

_HEAD = """\
# What you can rely on, and what not

<!-- Written by `python -m docs.guarantees` from the docstrings of the tests. Change them there. -->

Each sentence of this table is the docstring of a test. Tests of a start, a stop or a failure use
`mpiddp launch`, a real MPI and real ssh. Tests of checkpoints use real ranks, most of them without a
launcher. For example, to run `start: test_message_passing`:

```sh
./run.sh test all -n 0 tests/promises/test_start.py -k test_message_passing
```

| you can rely on this | test |
|---|---|
"""
_LIMITS = """
## What you cannot rely on

- **Several GPUs have never been tested.** mpiddp has run on [one H100](evidence/gpu.md). Its tests run over
  gloo.
- **Nobody has found a hang in NCCL with it yet.** The same code finds hangs over gloo. On a GPU it has not
  run.
- **A resume on three ranks or more may differ in the last bit** in a script of your own, because DDP sums
  the gradients in another order after its first step. `mpiddp train` fixes that order, so it resumes exactly.
- **A DataLoader begins its epoch again,** unless the script leaves out the batches that are done, or uses
  [`mpiddp.Sampler`](your-own-script.md#4-a-whole-loop-with-epochs).
- **A node that dies ends a Slurm job,** unless the job has [`--no-kill`](slurm.md#a-node-that-dies).
- **Nothing is encrypted, and torch's own ports have no password.** Use mpiddp in a
  [network that you trust](security.md).
- **Some schedulers were tested only by their variables:**
  [PBS, LSF, Flux, Kubeflow and SkyPilot](clusters.md#what-is-supported).
- **mpiddp has no queue.** Two jobs on the same machines take each other's GPUs, unless the later one waits
  for them with `--wait-for-hosts 8h`. A process in another container is not seen.
- **It is alpha.** Options and names may still change, and each change is in the CHANGELOG.
"""

# By chapter of tests/promises: the tests, in the order of the page.
_PROMISES = [
    ("start", "test_message_passing"),
    ("variables", "test_the_variables_of_torchrun"),
    ("as_under_torchrun", "test_what_differs"),
    ("start", "test_all_broken_hosts_at_once"),
    ("start", "test_all_hosts_run_the_same_code"),
    ("allocations", "test_never_silently_alone"),
    ("start", "test_ranks_elsewhere_than_listed"),
    ("start", "test_a_refusal_is_printed_once"),
    ("failures", "test_who_failed_first"),
    ("failures", "test_every_mpi_ends_the_job"),
    ("failures", "test_a_cut_link"),
    ("failures", "test_orphans"),
    ("hangs", "test_a_hang_of_any_script"),
    ("stop", "test_the_same_step"),
    ("stop", "test_every_signal"),
    ("stop", "test_a_file_that_is_being_written"),
    ("stop", "test_a_file_that_a_second_signal_tears"),
    ("stop", "test_a_rank_killed_in_dcp"),
    ("stop", "test_files_that_are_written_anywhere"),
    ("stop", "test_sigterm_to_every_process"),
    ("stop", "test_a_preempted_job_comes_back"),
    ("checkpoints", "test_training_resumes_bit_for_bit"),
    ("checkpoints", "test_kill_at_any_moment"),
    ("checkpoints", "test_any_flipped_bit_or_cut_is_found"),
    ("checkpoints", "test_damaged_checkpoint_gives_way"),
    ("states", "test_foreign_files_run_no_code"),
    ("checkpoints", "test_lost_host_of_rank_0"),
    ("checkpoints", "test_full_disk"),
    ("checkpoints", "test_failed_saves_are_counted"),
    ("checkpoints", "test_run_in_use_is_refused"),
    ("images", "test_a_folder_that_is_lost_with_its_container"),
    ("checkpoints", "test_killed_script_restarts"),
    ("restarts", "test_restart_args"),
    ("restarts", "test_a_lost_host"),
    ("output", "test_lines_are_whole"),
    ("detached", "test_a_job_outlives_its_terminal_and_its_shell"),
    ("variables", "test_what_crosses_the_network"),
    ("variables", "test_a_hostfile_is_no_program"),
    ("who_may_connect", "test_another_user"),
    ("who_may_connect", "test_strangers"),
    ("doctor", "test_doctor_raises_no_false_alarm"),
]


def text() -> str:
    """The page."""
    rows = [f"| {_sentence(*promise)} | {promise[0]}: `{promise[1]}` |" for promise in _PROMISES]
    return _HEAD + "\n".join(rows) + "\n" + _LIMITS


def _sentence(chapter: str, test: str) -> str:
    """The first paragraph of the docstring of the test, with a link for each page that it names."""
    module = ast.parse((_TESTS / f"test_{chapter}.py").read_text(encoding="utf-8"))
    (found,) = [
        node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == test
    ]
    sentence = " ".join(str(ast.get_docstring(found)).partition("\n\n")[0].split())
    return re.sub(r"docs/([a-z-]+\.md)", r"[this page](\1)", sentence)


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
