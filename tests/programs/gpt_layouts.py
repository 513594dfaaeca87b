"""Train the GPT of examples/gpt in several layouts, one after the other, in the same ranks.

    mpiddp launch -n 4 tests/programs/gpt_layouts.py '[["--out=a", "--tp=2"], ["--out=b", "--fsdp"]]'

Each layout trains four steps. Then the next layout makes the last step again, in OUT/again, a copy of the run
without that step. The last layout has "without_NAME", which leaves that function out, as a mistake would.
"""

import json
import shutil
import sys
from itertools import pairwise

import pytest
import torch.distributed as dist

import mpiddp
from tests.support.ranks import ROOT

sys.path.insert(0, str(ROOT / "examples/gpt"))  # as when python starts the script

import parallel
import train

WITHOUT = "without_"


STEPS = 4


def run(layout: list[str], world: mpiddp.World) -> None:
    missing = [word.removeprefix(WITHOUT) for word in layout if word.startswith(WITHOUT)]
    options = [word for word in layout if not word.startswith(WITHOUT)]
    with pytest.MonkeyPatch.context() as patches:
        for name in missing:
            patches.setattr(parallel, name, lambda *arguments: None)
        train.train(train.parse([*options, f"--steps={STEPS}", "--save-every=1"]), world)


def main(layouts: str) -> None:
    with mpiddp.process_group(backend="gloo") as world:
        *out_and_options, wrong = json.loads(layouts)
        for layout in out_and_options:
            run(layout, world)
        with pytest.raises(
            ValueError, match=r"'token.weight'\] differs: .* on rank 0 .* on rank 2"
        ):
            run(wrong, world)
        for (out, *_), (_, *options) in pairwise(out_and_options):
            again = f"{out}/again"
            if world.rank == 0:
                folder = out.partition("=")[2]
                shutil.copytree(folder, f"{folder}/again")
                shutil.rmtree(f"{folder}/again/checkpoints/step_{STEPS:08}")
            dist.barrier()
            run([again, *options], world)


if __name__ == "__main__":
    main(sys.argv[1])
