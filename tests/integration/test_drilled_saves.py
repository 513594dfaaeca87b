"""What a rank of a drill records and does within saves and batches, in this process.

Tests mpiddp/drill/observer.py and faults.py. tests/promises/test_doctor.py has whole drills.
python -m pytest tests/integration/test_drilled_saves.py
"""

import json
import threading
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from mpiddp.drill import faults
from mpiddp.drill.faults import Plan
from mpiddp.drill.observer import _Observer, _watch_batches, _watch_saves

NET = torch.nn.Linear(1, 1)


class Killed(Exception):
    pass


def kill() -> None:
    raise Killed


@pytest.fixture(autouse=True)
def drilled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "save", torch.save)  # the fixture restores it
    for name in ("__init__", "_reset", "_next_index", "__next__"):
        monkeypatch.setattr(_BaseDataLoaderIter, name, getattr(_BaseDataLoaderIter, name))
    monkeypatch.setattr(faults, "kill", kill)


def test_the_files_of_a_save_count_at_the_step_of_its_first(tmp_path):
    """A thread writes them while the training goes on, and a fault of step 6 spares the save of step 5."""
    observer = _Observer(tmp_path, 0, Plan("kill-in-save", step=6, in_files=True))
    _watch_saves(observer)

    def write() -> None:
        for observer.step, name in ((5, "model.pt"), (6, "optimizer.pt")):
            torch.save({"a": torch.ones(1)}, tmp_path / name)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    [records] = tmp_path.glob("*.jsonl")
    assert [json.loads(line)["step"] for line in records.open()] == [5, 5]


def loader(workers: int, length: int = 20) -> DataLoader[tuple[torch.Tensor, ...]]:
    data = TensorDataset(torch.arange(float(length))[:, None])
    return DataLoader(data, 2, num_workers=workers, persistent_workers=workers > 0)


def trained(observer: _Observer, batches: Iterator[tuple[torch.Tensor]]) -> list[list[int]]:
    """For each step on such a batch, the samples that were recorded minus those of the batch: all []."""
    found = []
    for (x,) in batches:
        observer.before_forward(NET, ())
        recorded, observer._samples = observer._samples, []
        found.append([a - int(b) for a, b in zip(recorded, x[:, 0], strict=True)])
    return found


def test_batches_that_an_early_break_leaves_in_workers_are_forgotten(tmp_path):
    """From the second epoch on, each batch had the numbers of another one."""
    _watch_batches(observer := _Observer(tmp_path, 0, Plan()))
    batches = loader(2)
    for _ in range(2):
        epoch = iter(batches)
        assert trained(observer, (next(epoch) for _ in range(3))) == [[0, 0]] * 3


@pytest.mark.parametrize("ahead", [1, 2])
def test_batches_that_a_resumed_script_skips_are_not_read_twice(tmp_path, ahead):
    """Also where a framework has the next batch already when it calls the model."""
    first = _Observer(tmp_path, 0, Plan())
    first._file.close()
    _watch_batches(observer := _Observer(tmp_path, 0, Plan(ahead=ahead)))
    batches = iter(loader(0))
    got = [next(batches) for _ in range(4 + ahead - 1)]

    def following() -> Iterator[tuple[torch.Tensor]]:
        queue = got[-ahead:]
        for _ in range(3):
            yield queue.pop(0)
            queue.append(next(batches))

    assert trained(observer, following()) == [[0, 0]] * 3
