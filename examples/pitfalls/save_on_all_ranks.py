"""All ranks save into one file: it ends as the file of any rank, or of none.

mpiddp launch -n 2 examples/pitfalls/save_on_all_ranks.py
"""

import pickle
import sys
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

import mpiddp

ROUNDS = 6


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/pitfall/snapshot.pt")
    with mpiddp.process_group() as world:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A part of the state that differs between ranks, as BatchNorm's statistics and random numbers do.
        state = {"own": torch.full((1 << 20,), float(world.rank))}
        for savers in ([0], range(world.world_size)):
            contents: Counter[str] = Counter()
            for number in range(ROUNDS):
                dist.barrier()
                # Ranks never arrive at the same moment. Here each in turn is the last.
                time.sleep(0.1 * (world.rank == number % world.world_size))
                if world.rank in savers:
                    torch.save(state, path)
                dist.barrier()
                contents[whose(path)] += 1
            if world.rank == 0:
                who = "rank 0" if len(savers) == 1 else "all ranks"
                counts = ", ".join(f"{count} times {name}" for name, count in contents.items())
                print(f"saved by {who}: {counts}", flush=True)


def whose(path: Path) -> str:
    try:
        values = torch.load(path)["own"].unique().tolist()
    except (RuntimeError, EOFError, KeyError, OSError, pickle.UnpicklingError):
        return "an unreadable file"
    return f"the file of rank {values[0]:g}" if len(values) == 1 else "a mixture"


if __name__ == "__main__":
    main()
