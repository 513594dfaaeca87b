"""Save a checkpoint, or meet it in a wrong way: wrong_resume.py FOLDER WRONG."""

import sys

import torch

import mpiddp

folder, wrong = sys.argv[1:]
world = mpiddp.init(backend="gloo")
checkpoints = mpiddp.Checkpoints(folder, config={"width": 2 if wrong == "config" else 1})
model = torch.nn.Linear(2, 3)
if wrong != "no resume":
    saved = checkpoints.resume()
    if saved is None:
        checkpoints.save(1, {"model": model.state_dict()})
if wrong == "no resume":
    checkpoints.save(2, {})
if wrong == "model":
    saved.load_into(model=torch.nn.Linear(3, 3))
