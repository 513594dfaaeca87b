"""Rank 0 sends a tensor to every rank, and each rank replies: a first test of a cluster.

    mpiddp launch --hostfile hostfiles/two_nodes examples/message_passing.py --backend gloo

The same file runs under a plain mpirun, torchrun, torch.distributed.launch and srun.
"""

import argparse

import torch
import torch.distributed as dist

import mpiddp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("nccl", "gloo"))
    parser.add_argument(
        "--local-rank", "--local_rank", help="set by torch.distributed.launch; ignored"
    )
    options = parser.parse_args()

    with mpiddp.process_group(backend=options.backend) as world:
        if world.rank == 0:
            for rank in range(1, world.world_size):
                data = torch.full((1,), float(rank), device=world.device)
                dist.send(data, dst=rank)
                print(f"worker_0 sent data to Rank {rank}", flush=True)
            for rank in range(1, world.world_size):
                reply = torch.zeros(1, device=world.device)
                dist.recv(reply, src=rank)
                print(f"worker_0 has received {reply.item():g} from rank {rank}", flush=True)
        else:
            data = torch.zeros(1, device=world.device)
            dist.recv(data, src=0)
            print(f"worker_{world.rank} has received data from rank 0", flush=True)
            dist.send(data * 10, dst=0)


if __name__ == "__main__":
    main()
