"""Print what TensorBoard shows of a folder, by its own reader."""

import json
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

events = EventAccumulator(sys.argv[1])
events.Reload()
tags = events.Tags()["scalars"]
print(json.dumps({tag: [[each.step, each.value] for each in events.Scalars(tag)] for tag in tags}))
