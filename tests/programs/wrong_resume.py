"""Save a checkpoint, or meet it in a wrong way: wrong_resume.py FOLDER WRONG."""

import os
import signal
import sys
from pathlib import Path

import torch

import mpiddp

folder, wrong = sys.argv[1:]
world = mpiddp.init(backend="gloo")
restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
folder += {"folder": f"-{world.rank}", "restart": f"-{restart}"}.get(wrong, "")
if wrong in ("links", "places"):  # a home folder is a link on some hosts
    Path(str(world.rank)).mkdir(exist_ok=True)
    os.chdir(str(world.rank))
    if wrong == "links" and world.rank == 1 and restart == "0":
        Path("../0/new").mkdir(parents=True, exist_ok=True)
        Path("new").symlink_to("../0/new")
        os.kill(os.getpid(), signal.SIGKILL)  # before the ranks have named a folder
width = {"config": 2, "width": world.rank}.get(wrong, 1)
checkpoints = mpiddp.Checkpoints(folder, config={"width": width})
torch.manual_seed(0)
model = torch.nn.Linear(2, 3)
if wrong != "no resume":
    saved = checkpoints.resume()
    if wrong == "links" and world.rank == 1 and restart == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if saved is None:
        checkpoints.save(1, {"model": model.state_dict()})
if wrong in ("no resume", "step"):
    checkpoints.save(2 + (wrong == "step") * world.rank, {})
if wrong == "model":
    saved.load_into(model=torch.nn.Linear(3, 3))
if wrong == "restart" and world.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
