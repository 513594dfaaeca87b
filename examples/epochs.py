"""A whole training: epochs, a DataLoader, a progress bar, a validation, and the lines of mpiddp.

    pip install tqdm
    mpiddp launch --hostfile hostfiles/two_nodes --max-restarts 3 examples/epochs.py

It resumes in the middle of an epoch, on the same number of ranks. examples/epochs_on_any_ranks.py resumes on
another number, too. docs/your-own-script.md explains mpiddp's lines.
"""

import itertools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset
from tqdm import tqdm

import mpiddp

EPOCHS, BATCH = 5, 32  # samples of a step on each rank


def make_data(samples: int, seed: int) -> TensorDataset:
    """Points of a plane, with the number of their quadrant."""
    points = torch.randn(samples, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, (points[:, 0] > 0).long() + 2 * (points[:, 1] > 0))


def validate(net: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """The accuracy over all samples, each of which one rank reads."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    counts = torch.zeros(2, device=device)
    net.eval()
    with torch.no_grad():
        for inputs, labels in DataLoader(Subset(data, range(rank, len(data), ranks)), 256):
            right = net(inputs.to(device)).argmax(1) == labels.to(device)
            counts += torch.stack([right.sum(), torch.tensor(len(right), device=device)])
    net.train()
    dist.all_reduce(counts)  # every rank calls it, so it stands outside of `if rank == 0`
    return float(counts[0] / counts[1])


def main() -> None:
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4)).to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)  # a step per epoch
    data, test_data = make_data(1280, seed=1), make_data(512, seed=2)
    sampler = DistributedSampler(data)
    # With a generator of its own, a loader that begins again draws nothing from torch's.
    own = torch.Generator()
    loader = DataLoader(data, BATCH, sampler=sampler, num_workers=2, generator=own)
    checkpoints = mpiddp.Checkpoints("runs/epochs", every="10m")
    step, steps = 0, EPOCHS * len(loader)  # over all epochs
    parts = {"model": net, "optimizer": optimizer, "scheduler": scheduler}
    if saved := checkpoints.resume():
        saved.load_into(**parts)
        step = saved.step

    def save() -> None:
        checkpoints.save(step, {name: part.state_dict() for name, part in parts.items()})

    while step < steps:
        epoch, done = divmod(step, len(loader))
        sampler.set_epoch(epoch)
        batches = itertools.islice(loader, done, None)  # without the batches before the stop
        bar = tqdm(batches, f"epoch {epoch}", len(loader), initial=done, disable=rank > 0)
        for inputs, labels in bar:
            step += 1
            loss = cross_entropy(model(inputs.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % len(loader) == 0:
                continue  # the epoch is saved once it is validated
            if checkpoints.due(step):
                save()
            if mpiddp.should_stop():
                return
        scheduler.step()
        accuracy = validate(net, test_data, device)
        mpiddp.log_metrics(step, accuracy=accuracy)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.4f}", flush=True)
        save()
        if mpiddp.should_stop():
            return
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
