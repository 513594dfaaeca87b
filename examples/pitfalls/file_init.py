"""init_method="file://…" works if all hosts see the same new file.

mpiddp launch --hostfile hostfiles/two_nodes examples/pitfalls/file_init.py /mnt/shared/store
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    url = f"file://{Path(sys.argv[1]).absolute()}"
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world_size)
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    if rank == 0:
        print(f"the ranks of {world_size} add up to {total.item():g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
