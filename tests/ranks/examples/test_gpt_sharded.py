"""The GPT divided by tensor parallelism, FSDP and a pipeline trains as the undivided one.

Tests examples/gpt/sharded.py, examples/gpt/parallel.py and examples/gpt/compare.py.
python -m pytest tests/ranks/examples/test_gpt_sharded.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tests.support.ranks import launch, mpirun, own_lines

TINY = ("--layers=3", "--width=16", "--heads=4", "--context=12", "--batch-size=16", "--steps=3")
SHARDED = "examples/gpt/sharded.py"
TOLERANCE = 1e-5
WITHOUT_TABLE = "without_sum_table --pp=2"  # see tests/jobs/gpt_layouts.py
WITHOUT_SUM = "without_sum_gradients --tp=2"


def results(ranks: int, *layouts: str) -> list[Any]:
    """For each layout the largest differences to the undivided model, or why it is refused."""
    split = [[*TINY, *layout.split()] for layout in layouts]
    done = mpirun(ranks, "-m", "tests.jobs.gpt_layouts", json.dumps(split))
    assert (done.returncode, own_lines(done.stderr)) == (0, []), done.stderr
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == len(layouts)
    return found


def require_equal(layouts: Sequence[str], found: list[Any]) -> None:
    for layout, differences in zip(layouts, found, strict=True):
        assert differences.keys() == {"loss", "gradients", "weights"}, (layout, differences)
        assert max(differences.values()) < TOLERANCE, (layout, differences)


def test_two_ranks_divide_the_model() -> None:
    """Tensor parallel, fully sharded, in two stages (of one and two blocks), and data parallel alone."""
    layouts = ("--tp=2", "--fsdp", "--pp=2", "--tp=1")
    *right, wrong = results(2, *layouts, WITHOUT_TABLE)
    require_equal(layouts, right)
    assert wrong["gradients"] > 100 * TOLERANCE


def test_four_ranks_divide_the_model_in_two_ways_at_once() -> None:
    layouts = ("--tp=2", "--tp=2 --fsdp", "--pp=2 --microbatches=2", "--tp=2 --pp=2", "--tp=4")
    *right, wrong = results(4, *layouts, WITHOUT_SUM)
    require_equal(layouts, right)
    assert wrong["gradients"] > 100 * TOLERANCE


def test_a_user_sees_the_differences() -> None:
    done = launch("-n", "2", SHARDED, "--tp=2", "--compare", *TINY, MPIDDP_LOG_RANKS="0")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "2 ranks: pp 1 × dp 1 × tp 2"
    assert lines[-1].startswith("largest relative differences to the undivided model: loss ")


REFUSED = {
    "--tp=2 --heads=3 --width=12": "--heads 3 cannot be divided by --tp 2, and a rank has whole heads. Use",
    "--tp=3 --heads=3 --width=12": "--tp 3 × --pp 1 needs a multiple of 3 ranks, and this job has 2. Start",
    "--pp=2 --layers=1": "--layers 1 is less than --pp 2, and a stage has a block at least. Use",
    "--pp=2 --fsdp": "--fsdp and --pp exclude each other in this example. Use",
    "--pp=2 --microbatches=1": "--microbatches 1 is less than --pp 2: stages would wait. Use",
    "--pp=2 --batch-size=6": "--batch-size 6 cannot be divided by 4 microbatches of all data parallel ranks.",
    "--batch-size=5": "--batch-size 5 cannot be divided by 2 data parallel ranks. Use 4 or 6.",
    "--width=20": "--width 20 is not a multiple of 2 × --heads 4: every head takes an even part of it. Ex",
    "--tp=two": "argument --tp: expected a whole number, 1 or more, not 'two'. See:",
}


def test_what_cannot_be_divided_is_one_sentence() -> None:
    for found, sentence in zip(results(2, *REFUSED), REFUSED.values(), strict=True):
        assert sentence in found
        assert "\n" not in found


def test_all_ranks_leave_with_code_2_and_one_sentence() -> None:
    done = mpirun(2, SHARDED, "--tp=2", "--heads=3", "--width=12")
    assert done.returncode == 2, done.stderr
    (line,) = own_lines(done.stderr)
    assert line.startswith("--heads 3 cannot be divided by --tp 2")
