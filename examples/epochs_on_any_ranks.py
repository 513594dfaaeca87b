"""examples/epochs.py with `mpiddp.Sampler`: it resumes in the middle of an epoch, on any number of ranks.

mpiddp launch --hostfile hostfiles/two_nodes --max-restarts 3 examples/epochs_on_any_ranks.py
"""

import os

import torch
import torch.distributed as dist
from epochs import EPOCHS, make_data, validate
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from tqdm import tqdm

import mpiddp

GLOBAL_BATCH = 64  # samples of a step over all ranks


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
    sampler = mpiddp.Sampler(len(data), GLOBAL_BATCH)
    own = torch.Generator()
    loader = DataLoader(data, batch_sampler=sampler, num_workers=2, generator=own)
    checkpoints = mpiddp.Checkpoints("runs/epochs", every="10m")
    step = 0
    parts = {"model": net, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler}
    if saved := checkpoints.resume():
        saved.load_into(**parts)
        step = saved.step

    def save() -> None:
        checkpoints.save(step, {name: part.state_dict() for name, part in parts.items()})

    while sampler.epoch < EPOCHS:
        epoch, done, length = sampler.epoch, sampler.step, sampler.steps_per_epoch
        batches = sampler.batches(loader)  # those that are left of the epoch
        for inputs, labels in tqdm(
            batches, f"epoch {epoch}", length, initial=done, disable=rank > 0
        ):
            step += 1
            loss = cross_entropy(model(inputs.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % length == 0:
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
