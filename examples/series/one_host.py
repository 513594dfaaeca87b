"""Step 2: DistributedDataParallel on one host. The script starts a process for each GPU, or two on CPUs.

python examples/series/one_host.py 10 2
"""

import argparse
import tempfile

import task
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def train(rank: int, ranks: int, init_method: str, options: argparse.Namespace) -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    # The ranks meet before they can communicate. NCCL has to know the device of its rank.
    if on_gpu:
        torch.cuda.set_device(device)
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=ranks)
    # DDP averages the gradients of all ranks during backward().
    model = DistributedDataParallel(task.make_model().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    dataset = task.make_data(options.samples)
    # Each rank gets its share of the samples, and of each step: together they are step 1's.
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, options.batch_size // ranks, sampler=sampler)
    for epoch in range(1, options.total_epochs + 1):
        sampler.set_epoch(epoch)  # the order of an epoch depends on its number alone
        loss_sum = torch.zeros((), device=device)
        for inputs, targets in loader:
            loss = mse_loss(model(inputs.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach()
        # Every rank calls a collective, so it is outside of `if rank == 0`.
        dist.all_reduce(loss_sum)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss_sum.item() / len(loader) / ranks:.6f}", flush=True)
        # The states are equal on all ranks, so one rank saves. DDP's model is in `.module`.
        is_due = epoch % options.save_every == 0 or epoch == options.total_epochs
        if rank == 0 and is_due:
            states = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({"epoch": epoch, **states}, options.out / "snapshot.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    arguments = task.parse()
    # One process per GPU. spawn passes the rank as first argument.
    processes = torch.cuda.device_count() or 2
    task.check(arguments, processes)
    task.check_folder(arguments.out)
    # The processes meet in a file that is new for each run, so no port has to be free.
    with tempfile.TemporaryDirectory() as folder:
        file = f"file://{folder}/store"
        torch.multiprocessing.spawn(train, (processes, file, arguments), nprocs=processes)
