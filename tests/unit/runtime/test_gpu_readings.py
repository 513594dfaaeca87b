"""The readings of a host's GPUs: one process of the tool at a time, and none after a failure.

Tests mpiddp/runtime/gpu_readings.py.
"""

import queue

import pytest

from mpiddp.runtime import gpu_readings
from mpiddp.runtime.gpu_readings import GpuReadings
from tests.support.machine import SECOND_GPU, nvidia_smi, tool
from tests.support.patience import PATIENCE_S

BUSY = nvidia_smi({"utilization.gpu": "97"}, {**SECOND_GPU, "utilization.gpu": "3"})


@pytest.fixture
def read(tmp_path, monkeypatch):
    """A function that gives this host a tool, and waits for so many readings, or until there are no more."""
    monkeypatch.setattr(gpu_readings, "EVERY_S", 0.0)

    def run(text, count=1, **env):
        starts = tmp_path / "starts"
        starts.write_text("")
        path = tool(tmp_path, "nvidia-smi", f"echo start >>{starts}\n{text}")
        found = queue.SimpleQueue()
        readings = GpuReadings([4, 5], {"PATH": path, **env}, lambda kind, ranks: found.put(ranks))
        readings.start()
        if count:
            read = [found.get(timeout=PATIENCE_S) for _ in range(count)]
            readings.stop()
        else:
            readings.join(PATIENCE_S)
            read = []
        assert not readings.is_alive()
        assert count or found.empty()
        return read, len(starts.read_text().splitlines())

    return run


def test_each_rank_has_the_readings_of_its_gpu(read):
    (first, *_), starts = read(BUSY, count=3)
    assert starts >= 3
    ranks = [(each["rank"], each["use"], each["memory_total"]) for each in first]
    assert ranks == [(4, 97, 81559 << 20), (5, 3, 81559 << 20)]
    (found,), _ = read(BUSY, CUDA_VISIBLE_DEVICES="1,GPU-18ac")
    assert [each["use"] for each in found] == [3, 97]
    (found,), _ = read(BUSY, CUDA_VISIBLE_DEVICES="MIG-aa01,1")
    assert [each["rank"] for each in found] == [5]


def test_a_tool_that_fails_is_not_started_again(read, monkeypatch):
    assert read("exit 9", count=0)[1] == 1
    monkeypatch.setattr(gpu_readings, "LIMIT_S", 0.3)
    assert read("exec sleep 6000", count=0)[1] == 1
