"""Ranks that need the workers of their DataLoader to save, which takes some seconds.

mpiddp launch -H localhost:2 tests/programs/loader.py
"""

import sys
import time

from torch.utils.data import DataLoader, Dataset

import mpiddp


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> int:
        time.sleep(0.002)
        return index


loader = iter(DataLoader(Numbers(), num_workers=2))  # before the rank says that it can stop
next(loader)
mpiddp.should_stop()
print("ready\n", end="", flush=True)
while not mpiddp.should_stop():
    next(loader)
time.sleep(2)
for _ in range(50):
    next(loader)  # the workers are still there
print("saved\n", end="", flush=True)
sys.exit(75)
