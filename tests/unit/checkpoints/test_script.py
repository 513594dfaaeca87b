"""mpiddp.Checkpoints in one process: when a save is due, what a step and a key may be, which calls fit."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import mpiddp  # noqa: E402
from mpiddp.runtime.job.session import current  # noqa: E402

Open = Callable[..., mpiddp.Checkpoints]


@pytest.fixture
def create(tmp_path: Path) -> Iterator[Open]:
    """Creates `Checkpoints` of one folder; closes them at the end of the test."""
    created = []

    def create(**options: Any) -> mpiddp.Checkpoints:
        created.append(mpiddp.Checkpoints(tmp_path / "run", **options))
        return created[-1]

    yield create
    for checkpoints in created:
        checkpoints.close()
    current().run = None


def test_a_step_before_the_resumed_one_is_refused(create):
    first = create()
    first.save(7, {})
    first.close()
    second = create()
    assert second.resume() is not None
    with pytest.raises(ValueError, match=r"step 1 .*step 7"):
        second.save(1, {})
    second.save(7, {})  # is saved already
    with pytest.raises(RuntimeError, match="once"):
        second.resume()


def test_any_key_is_a_file_of_its_own(create, tmp_path):
    keys = ("model", "a/b", "..", "é x", "%")
    state = {key: torch.tensor(number) for number, key in enumerate(keys)}
    first = create()
    first.save(1, state)
    first.close()
    folder = tmp_path / "run/checkpoints/step_00000001"
    saved = create().resume()
    assert saved.state == state
    assert [path.parent for path in (tmp_path / "run").rglob("*.safetensors")] == [folder] * 5


@pytest.mark.parametrize("key", ["shard_00000", "", "x" * 300])
def test_a_key_that_cannot_be_a_file(create, key):
    with pytest.raises(ValueError, match="file"):
        create().save(1, {key: 1})


def test_records_need_a_run(create):
    with pytest.raises(mpiddp.UserError, match="Checkpoints"):
        mpiddp.log_metrics(1, loss=2)
    create().resume()
    with pytest.raises(TypeError, match="loss"):
        mpiddp.log_metrics(1, loss=[2])
