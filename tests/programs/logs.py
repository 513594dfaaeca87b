"""Log a record for each step up to LAST, and save every fourth: logs.py LAST. A second start resumes."""

import sys

import mpiddp

with mpiddp.process_group(backend="gloo") as world:
    checkpoints = mpiddp.Checkpoints("run", every=4, config={"lr": 0.1})
    saved = checkpoints.resume()
    for step in range(saved.step + 1 if saved else 1, int(sys.argv[1]) + 1):
        mpiddp.log_metrics(step, loss=1 / step, resumed=saved is not None, name="a", best=None)
        if checkpoints.due(step):
            checkpoints.save(step, {})
