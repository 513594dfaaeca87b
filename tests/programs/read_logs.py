"""Print what libraries have got from logs.py, as JSON: {library: {run: [[step, loss], …]}}."""

import json
import struct
from pathlib import Path

Runs = dict[str, list[tuple[int, float]]]


def tensorboard() -> Runs:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator("run/tensorboard")
    events.Reload()
    assert "lr" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    return {"run/tensorboard": [(each.step, each.value) for each in events.Scalars("loss")]}


def wandb() -> Runs:
    from wandb.proto.wandb_internal_pb2 import Record

    runs: Runs = {}
    for path in sorted(Path("wandb").glob("offline-run-*/*.wandb")):
        name = path.stem.removeprefix("run-")
        content = path.read_bytes()
        assert len(content) < 1 << 15, "a record may lie in two blocks"
        at = 7  # behind the header of the file: one of LevelDB's logs
        while at < len(content):
            _, size, kind = struct.unpack_from("<IHB", content, at)
            assert kind == 1
            record = Record.FromString(content[at + 7 : at + 7 + size])
            at += 7 + size
            if values := {each.nested_key[0]: each.value_json for each in record.history.item}:
                loss = json.loads(values["loss"])
                runs.setdefault(name, []).append((json.loads(values["_step"]), loss))
    return runs


def mlflow() -> Runs:
    from mlflow import MlflowClient

    client = MlflowClient(f"file:{Path.cwd()}/mlruns")
    runs: Runs = {}
    for run in client.search_runs(["0"]):
        assert (run.info.status, run.data.params) == ("FINISHED", {"lr": "0.1"})
        history = client.get_metric_history(run.info.run_id, "loss")
        runs[run.info.run_name] = [(each.step, each.value) for each in history]
    return runs


print(json.dumps({each.__name__: each() for each in (tensorboard, wandb, mlflow)}))
