"""examples/ddp.py with nine more lines: it saves, resumes exactly, restarts, and stops on request.

    mpiddp launch --hostfile hostfiles/two_nodes --max-restarts 3 examples/ddp_with_checkpoints.py

docs/your-own-script.md explains each line.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpiddp

STEPS = 2000


def main() -> None:
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1)).to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    checkpoints = mpiddp.Checkpoints("runs/ddp", keep=2, every="10m")
    if saved := checkpoints.resume():
        saved.load_into(model=net, optimizer=optimizer)
    for step in range(saved.step + 1 if saved else 1, STEPS + 1):
        inputs = torch.randn(64, 32, device=device)
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0 and rank == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
        if checkpoints.due(step) or step == STEPS:
            checkpoints.save(step, {"model": net.state_dict(), "optimizer": optimizer.state_dict()})
        if mpiddp.should_stop():
            return
    if rank == 0:
        torch.save(net.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
