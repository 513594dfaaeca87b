"""Begin a last save, and end in one of several ways.

    mpiddp launch -n 2 tests/programs/last_save.py FOLDER HOW

HOW is "returns", "exits", "forks", "raises" (on rank 0) or "destroys" (the process group). With "full" the
disk has no more space for the save, as far as the processes can tell; then the script exits with 0. With
"full twice" it saves the same step once more before, as scripts do after their last step. With "full stop" it
saves a later step, under on_save_error="stop".
"""

import os
import resource
import signal
import sys

import torch
import torch.distributed as dist

import mpiddp

folder, how = sys.argv[1:]
dist.init_process_group("gloo")
checkpoints = mpiddp.Checkpoints(folder)
checkpoints.resume()
if how.startswith("full"):
    checkpoints.save(1, {"weight": torch.zeros(10)})
    checkpoints.close()
    options = {"on_save_error": "stop"} if how == "full stop" else {}
    checkpoints = mpiddp.Checkpoints(folder, **options)
    checkpoints.resume()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for _ in range(1 + how.endswith("twice")):
    checkpoints.save(2, {"weight": torch.zeros(10_000_000)})
if how == "full stop":
    checkpoints.save(3, {})
    print("went on", flush=True)
if how == "destroys":
    dist.destroy_process_group()
if how == "forks" and os.fork() == 0:
    sys.exit()
if how == "raises":
    if dist.get_rank() > 0:  # its own failure would cut the save of rank 0 off after a second
        signal.pause()
    raise ValueError("a bug")
if how != "returns":
    sys.exit(0)
