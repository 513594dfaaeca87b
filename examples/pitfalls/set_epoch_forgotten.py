"""Without set_epoch every epoch has the same order.

mpiddp launch -n 2 examples/pitfalls/set_epoch_forgotten.py
"""

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mpiddp


def main() -> None:
    with mpiddp.process_group() as world:
        dataset = TensorDataset(torch.arange(16))
        sampler = DistributedSampler(dataset)
        loader = DataLoader(dataset, batch_size=4, sampler=sampler)
        for calls_set_epoch in (False, True):
            for epoch in range(3):
                if calls_set_epoch:
                    sampler.set_epoch(epoch)
                order = [int(number) for (batch,) in loader for number in batch]
                if world.rank == 0:
                    how = "with" if calls_set_epoch else "without"
                    print(f"{how} set_epoch, epoch {epoch}: {order}", flush=True)


if __name__ == "__main__":
    main()
