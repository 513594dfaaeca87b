"""Train the GPT of examples/gpt/sharded.py in several layouts, one after the other, in the same ranks.

    mpiddp launch -n 4 tests/programs/gpt_layouts.py '[["--tp", "2"], ["--fsdp"]]'

Rank 0 prints a list of JSON: for each layout the largest differences to the undivided model, or the sentence
that refuses it. A layout with "without_NAME" leaves that function out, as a mistake would: the differences
must show it.
"""

import json
import sys

import pytest

import mpiddp
from tests.support.ranks import ROOT

sys.path.insert(0, str(ROOT / "examples/gpt"))  # as when python starts the script

import sharded

WITHOUT = "without_"


def result(layout: list[str], world: mpiddp.World) -> dict[str, float] | str:
    try:
        return differences(layout, world)
    except mpiddp.UserError as error:  # on all ranks
        return str(error)


def differences(layout: list[str], world: mpiddp.World) -> dict[str, float]:
    left_out = [each.removeprefix(WITHOUT) for each in layout if each.startswith(WITHOUT)]
    options = sharded.parse([each for each in layout if not each.startswith(WITHOUT)])
    options.compare = True
    with pytest.MonkeyPatch.context() as patches:
        for name in left_out:
            patches.setattr(sharded, name, lambda *arguments: None)
        return sharded.train(options, world)


def main(layouts: str) -> None:
    with mpiddp.process_group(backend="gloo") as world:
        found = [result(layout, world) for layout in json.loads(layouts)]
        if world.rank == 0:
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
