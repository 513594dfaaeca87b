"""Step 1: one process trains on one device.

python examples/series/one_device.py 10 2
"""

import argparse

import task
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, RandomSampler


def train(options: argparse.Namespace) -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    model = task.make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    dataset = task.make_data(options.samples)
    sampler = RandomSampler(dataset, generator=torch.Generator())
    loader = DataLoader(dataset, options.batch_size, sampler=sampler)
    for epoch in range(1, options.total_epochs + 1):
        sampler.generator.manual_seed(epoch)  # the order of an epoch depends on its number alone
        loss_sum = torch.zeros((), device=device)
        for inputs, targets in loader:
            loss = mse_loss(model(inputs.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach()
        print(f"epoch {epoch}: loss {loss_sum.item() / len(loader):.6f}", flush=True)
        if epoch % options.save_every == 0 or epoch == options.total_epochs:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({"epoch": epoch, **states}, options.out / "snapshot.pt")


if __name__ == "__main__":
    arguments = task.parse()
    task.check(arguments, ranks=1)
    task.check_folder(arguments.out)
    train(arguments)
