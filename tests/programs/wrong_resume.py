"""Save a checkpoint, or meet it in a wrong way: wrong_resume.py FOLDER WRONG."""

import os
import signal
import sys

import torch

import mpiddp

folder, wrong = sys.argv[1:]
world = mpiddp.init(backend="gloo")
restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
folder += {"folder": f"-{world.rank}", "restart": f"-{restart}"}.get(wrong, "")
width = {"config": 2, "width": world.rank}.get(wrong, 1)
checkpoints = mpiddp.Checkpoints(folder, config={"width": width})
torch.manual_seed(0)
model = torch.nn.Linear(2, 3)
if wrong != "no resume":
    saved = checkpoints.resume()
    if saved is None:
        checkpoints.save(1, {"model": model.state_dict()})
if wrong in ("no resume", "step"):
    checkpoints.save(2 + (wrong == "step") * world.rank, {})
if wrong == "model":
    saved.load_into(model=torch.nn.Linear(3, 3))
if wrong == "restart" and world.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
