"""examples/ddp_with_checkpoints.py with fewer steps, and with lines of a test in each step."""

from pathlib import Path

from tests.support.ranks import ROOT, script

PLAIN, EXAMPLE = ROOT / "examples/ddp.py", ROOT / "examples/ddp_with_checkpoints.py"
STEPS = 40
# Rank 1 dies in the first attempt, after the save of step 15 and before the save of step 20.
DIES = """
        if step == 18 and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), 9)
"""
ENDS_OF_A_STEP = "        optimizer.step()\n"


def example(folder: Path, *, every: int = 5, each_step: str = "") -> Path:
    """The example with fewer steps and more saves, in a working folder of its own."""
    text = EXAMPLE.read_text()
    changes = {
        "STEPS = 2000": f"STEPS = {STEPS}",
        'every="10m"': f"every={every}",
        ENDS_OF_A_STEP: ENDS_OF_A_STEP + each_step.removeprefix("\n"),
    }
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    folder.mkdir(exist_ok=True)
    return Path(script(folder, text))
