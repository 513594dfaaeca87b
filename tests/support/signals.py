"""A script whose save takes long."""

from __future__ import annotations

SLOW_SAVE = """
import os, sys, time
import mpiddp
from torch.utils.data import DataLoader
class Numbers:
    def __len__(self): return 10**9
    def __getitem__(self, i): time.sleep(0.002); return i
loader = iter(DataLoader(Numbers(), num_workers=2))  # before the rank says that it can stop
next(loader)
mpiddp.should_stop()
print("ready\\n", end="", flush=True)
while not mpiddp.should_stop():
    next(loader)
time.sleep(3)
for _ in range(50):
    next(loader)  # the workers are still there
print("saved\\n", end="", flush=True)
sys.exit(75)
"""
