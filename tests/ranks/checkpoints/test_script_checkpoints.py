"""mpiddp.Checkpoints in a script of one process: what it saves, resumes and refuses.

Tests mpiddp/checkpoints/script.py.
python -m pytest tests/ranks/checkpoints/test_script_checkpoints.py
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import subprocess
import sys
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mpiddp
from mpiddp.checkpoints import folder as directory
from mpiddp.checkpoints.contents import Resumed
from mpiddp.runtime.job.session import current
from tests.support.errors import error
from tests.support.patience import PATIENCE_S
from tests.support.ranks import clean_env
from tests.support.training import unequal

Open = Callable[..., mpiddp.Checkpoints]


@pytest.fixture
def create(tmp_path: Path) -> Iterator[Open]:
    """Creates `Checkpoints` of one folder; closes them at the end of the test."""
    created = []

    def create(folder: str = "run", **options: Any) -> mpiddp.Checkpoints:
        created.append(mpiddp.Checkpoints(tmp_path / folder, **options))
        return created[-1]

    yield create
    for checkpoints in created:
        checkpoints.close()
    current().run = None


def saved_by(create: Open, *steps: int, folder: str = "run", **state: Any) -> Resumed:
    """What a second script resumes that finds checkpoints of these steps."""
    first = create(folder)
    first.resume()
    for step in steps:
        first.save(step, state)
    first.close()
    resumed = create(folder).resume()
    assert resumed is not None
    return resumed


STATES = {
    "plain": {"epoch": 3, "name": "a", "best": 0.1, "done": False, "none": None, "big": 1 << 100},
    "special floats": {"values": [float("inf"), -0.0, 1e-320]},
    "nested": {
        "list": [1, (2, "three"), {"four": [torch.ones(2)]}],
        "keys": {0: "a", 1.5: "b", 1 << 1999: "c"},
    },
    "tensors": {
        "half": torch.randn(3).half(),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "transposed": torch.randn(2, 3).T,
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "complex": torch.randn(2, dtype=torch.complex64),
        "bool": torch.tensor([True, False]),
    },
    "dicts": {"ordered": OrderedDict(a=1), "counter": Counter("aab")},
    "empty": {},
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_returns_as_it_was_saved(create: Open, name: str) -> None:
    state = STATES[name]
    resumed = saved_by(create, 5, **state)
    assert resumed.step == 5
    assert unequal(dict(resumed.state), state) == []
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            assert resumed.state[key].dtype == value.dtype


@pytest.mark.parametrize(
    ("scheduler", "options"),
    [("OneCycleLR", {"max_lr": 1, "total_steps": 9}), ("MultiStepLR", {"milestones": [2, 2, 3]})],
)
def test_models_optimizers_and_schedulers_return(
    create: Open, scheduler: str, options: dict[str, Any]
) -> None:
    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer, getattr(torch.optim.lr_scheduler, scheduler)(optimizer, **options)

    model, optimizer, schedule = build()
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    schedule.step()
    objects = {"model": model, "optimizer": optimizer, "schedule": schedule}
    states = {name: each.state_dict() for name, each in objects.items()}
    resumed = saved_by(create, 1, **states)
    versions = getattr(resumed.state["model"], "_metadata")  # noqa: B009 - mypy does not know it
    assert versions["1"] == {"version": 2}
    model, optimizer, schedule = build()
    resumed.load_into(model=model, optimizer=optimizer, schedule=schedule)
    assert unequal(dict(model.state_dict()), dict(states["model"])) == []
    assert unequal(optimizer.state_dict(), states["optimizer"]) == []
    assert schedule.state_dict() == states["schedule"]


def test_a_scheduler_of_schedulers_returns(create: Open) -> None:
    """The state of SequentialLR has those of its schedulers, and MultiStepLR's has a Counter."""

    def build() -> torch.optim.lr_scheduler.SequentialLR:
        schedulers = torch.optim.lr_scheduler
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
        parts = [schedulers.ConstantLR(optimizer), schedulers.MultiStepLR(optimizer, [2, 4])]
        return schedulers.SequentialLR(optimizer, parts, milestones=[3])

    resumed = saved_by(create, 1, schedule=build().state_dict())
    schedule = build()
    resumed.load_into(schedule=schedule)
    for _ in range(8):
        schedule.optimizer.step()
        schedule.step()
    assert schedule.get_last_lr() == pytest.approx([0.01])


def test_random_numbers_continue(create: Open) -> None:
    def draw() -> list[Any]:
        return [random.random(), np.random.rand(), torch.rand(()).item(), random.gauss(0, 1)]

    first = create()
    first.resume()
    random.gauss(0, 1)  # keeps a second number
    first.save(1, {}, per_rank={"position": 12})
    expected = draw()
    first.close()
    draw()
    resumed = create().resume()
    assert resumed is not None
    assert draw() == expected
    assert resumed.per_rank == {"position": 12}
    assert resumed.world_size == 1


def test_a_save_is_a_snapshot(create: Open) -> None:
    """The training changes its tensors, and its lists, while the thread writes."""
    weight, history = torch.zeros(1_000_000), [1]
    checkpoints = create()
    checkpoints.resume()
    checkpoints.save(1, {"weight": weight, "history": history}, per_rank={"own": weight})
    weight.fill_(1)
    history.append(2)
    checkpoints.close()
    resumed = create().resume()
    assert resumed is not None
    assert resumed.state["weight"].sum() == resumed.per_rank["own"].sum() == 0
    assert resumed.state["history"] == [1]


def test_a_script_may_change_its_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoints = mpiddp.Checkpoints("run")
    checkpoints.resume()
    checkpoints.save(1, {"weight": torch.zeros(1_000_000)})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    checkpoints.save(2, {})
    checkpoints.close()
    current().run = None
    steps = [folder.name for folder in directory.list_steps(tmp_path / "run/checkpoints")]
    assert steps == ["step_00000001", "step_00000002"]
    assert list(Path().iterdir()) == []


def test_saves_in_and_after_inference_mode(create: Open) -> None:
    checkpoints = create()
    checkpoints.resume()
    with torch.inference_mode():
        checkpoints.save(1, {"weight": torch.zeros(2)})
    checkpoints.save(2, {"weight": torch.ones(2)})
    checkpoints.close()
    resumed = create().resume()
    assert resumed is not None
    assert resumed.state["weight"].sum() == 2


def test_the_thread_that_writes_gives_way_to_the_training(create: Open) -> None:
    checkpoints = create()
    checkpoints.resume()
    before = {each.native_id for each in threading.enumerate()}
    checkpoints.save(1, {})
    [thread] = {each.native_id for each in threading.enumerate()} - before
    assert thread is not None
    current().wait_for_saves()  # and not close, after which the thread ends
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, thread) == min(own + 10, 19)


def test_a_save_is_waited_for_while_its_checkpoints_close(
    create: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler of a signal may call os._exit(0) then."""
    may_write, write = threading.Event(), directory.complete

    def slow(*arguments: Any, **options: Any) -> None:
        assert may_write.wait(PATIENCE_S)
        write(*arguments, **options)

    monkeypatch.setattr(directory, "complete", slow)
    checkpoints = create()
    checkpoints.resume()
    checkpoints.save(1, {})
    closes = threading.Thread(target=checkpoints.close)
    closes.start()
    closes.join(0.2)
    waits = threading.Thread(target=current().wait_for_saves)
    waits.start()
    waits.join(0.2)
    has_waited = waits.is_alive()
    may_write.set()
    closes.join()
    waits.join()
    assert has_waited


class Text(str):
    """A subclass, which torch.load would refuse."""


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ({"lr": np.float64(1)}, r"state\['lr'\]: cannot save numpy.float64. .*\.item\(\)"),
        ({"a": {"b": [np.ones(2)]}}, r"state\['a'\]\['b'\]\[0\]: .*numpy.ndarray"),
        ({"model": torch.nn.Linear(1, 1)}, r"state\['model'\]: .*Linear. .*state_dict\(\)"),
        ({"f": print}, r"state\['f'\]: cannot save builtin_function_or_method. Expected tensors, "),
        ({"path": Path()}, r"state\['path'\]: cannot save pathlib"),
        ({"counts": defaultdict(int)}, r"state\['counts'\]: .*defaultdict"),
        ({"seen": {1}}, r"state\['seen'\]: cannot save set\."),
        ({"text": Text()}, r"state\['text'\]: cannot save .*Text"),
        ({"bytes": b""}, r"state\['bytes'\]: cannot save bytes"),
        ({"dict": {(1, 2): 3}}, r"state\['dict'\]: a key of type tuple. Use strings or numbers"),
        ({"sparse": torch.eye(2).to_sparse()}, r"state\['sparse'\]: .* layout torch.sparse_coo"),
        ({1: 2}, "state: expected a dict with names as keys"),
        ([1], "state: expected a dict with names as keys"),
    ],
)  # fmt: skip
def test_a_state_that_cannot_be_saved(create: Open, state: Any, sentence: str) -> None:
    checkpoints = create()
    with pytest.raises(TypeError, match=sentence):
        checkpoints.save(1, state)


@pytest.mark.parametrize("key", ["ranks", "shard_00000", "", "x" * 300])
def test_a_key_that_cannot_be_a_file(create: Open, key: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be the name of a file in the checkpoint\. Use"):
        create().save(1, {key: 1})


def test_any_other_key_is_a_file_of_its_own(create: Open, tmp_path: Path) -> None:
    state = {"model": 1, "a/b": 2, "..": 3, "é x": 4, "%": 5}
    assert saved_by(create, 1, **state).state == state
    folder = tmp_path / "run/checkpoints/step_00000001"
    assert torch.load(folder / "model.pt") == 1
    files = ["model", "a%2Fb", "..", "%C3%A9%20x", "%25", "ranks"]
    assert {path.name for path in folder.glob("*.pt")} == {f"{name}.pt" for name in files}


def test_a_refused_state_leaves_the_folder_as_it_is(create: Open, tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        create().save(1, {"a": object()})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"keep": 0}, ValueError, "keep: expected 1 or more, not 0"),
        ({"every": "often"}, ValueError, "every: 'often' is not "),
        ({"every": 0}, ValueError, "every: '0' is not "),
        ({"config": {"a": object()}}, TypeError, "not JSON serializable"),
        ({"on_save_error": "ignore"}, ValueError, 'on_save_error: expected "warn" or "stop"'),
    ],
)
def test_an_invalid_argument(
    create: Open, options: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        create(**options)


@pytest.mark.parametrize(
    ("step", "error"), [(-1, ValueError), (1.0, TypeError), (True, TypeError), (1 << 60, ValueError)]
)  # fmt: skip
def test_an_invalid_step(create: Open, step: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"step: expected"):
        create().save(step, {})


def test_due_by_steps_counts_multiples(create: Open) -> None:
    checkpoints = create(every=4)
    assert [step for step in range(1, 10) if checkpoints.due(step)] == [4, 8]
    samples = create("samples", every="100")
    assert [step for step in range(64, 400, 64) if samples.due(step)] == [128, 256, 320]
    assert not any(create("never", every=None).due(step) for step in range(1, 9))


def test_keep(create: Open, tmp_path: Path) -> None:
    checkpoints = create(keep=2)
    for step in (3, 10, 11):
        checkpoints.save(step, {})
    checkpoints.close()
    folders = directory.list_steps(tmp_path / "run" / "checkpoints")
    assert [directory.step_of(folder) for folder in folders] == [10, 11]


def test_two_of_one_folder_are_refused(create: Open) -> None:
    saved_by(create, 7)
    with pytest.raises(mpiddp.UserError, match=error("process. Close", "/run ")):
        create().resume()


def test_a_script_that_catches_an_error_finds_the_save_that_was_under_way(create: Open) -> None:
    """Its file takes longer to write than the script to go on."""
    with contextlib.suppress(ValueError), create() as checkpoints:
        checkpoints.save(7, {"model": {"weight": torch.zeros(50_000_000)}})
        raise ValueError
    resumed = create().resume()
    assert resumed is not None
    assert resumed.step == 7


def test_a_save_without_resume_refuses_older_checkpoints(create: Open, tmp_path: Path) -> None:
    first = create()
    first.save(7, {})
    first.close()
    with pytest.raises(mpiddp.UserError, match=error("an earlier", "step_00000007", "resume()")):
        create().save(1, {})
    assert [each.name for each in directory.list_steps(tmp_path / "run/checkpoints")] == [
        "step_00000007"
    ]


def test_a_step_before_the_resumed_one_is_refused(create: Open) -> None:
    first = create()
    first.save(7, {})
    first.close()
    second = create()
    assert second.resume() is not None
    with pytest.raises(ValueError, match=r"step 1 is earlier than step 7, which .*run has already"):
        second.save(1, {})
    second.save(7, {})  # is saved already
    with pytest.raises(RuntimeError, match=r"must be called once"):
        second.resume()


def test_a_broken_checkpoint_is_reported_and_the_one_before_it_used(
    create: Open, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = create()
    for step in (1, 2):
        first.save(step, {"step": step})
    first.close()
    file = tmp_path / "run/checkpoints/step_00000002/step.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    resumed = create().resume()
    assert resumed is not None
    assert (resumed.step, resumed.state) == (1, {"step": 1})
    assert (
        "step.pt does not match its SHA-256; resuming from step_00000001" in capfd.readouterr()[0]
    )


def test_another_config_is_refused(create: Open) -> None:
    first = create(config={"width": 3, "sizes": (1, 2)})
    first.save(1, {})
    first.close()
    sentence = error("same config", ": depth None, now 2; width 3, now 4. ")
    with pytest.raises(mpiddp.UserError, match=sentence):
        create(config={"width": 4, "sizes": [1, 2], "depth": 2}).resume()
    assert create(config={"sizes": (1, 2), "width": 3}).resume() is not None


def test_a_checkpoint_of_another_model_is_refused(create: Open) -> None:
    resumed = saved_by(create, 4, model=torch.nn.Linear(2, 3).state_dict())
    with pytest.raises(
        mpiddp.UserError, match=error("before, or", "step 4 ", "model: ", "size mismatch")
    ):
        resumed.load_into(model=torch.nn.Linear(3, 3))
    with pytest.raises(
        mpiddp.UserError, match=error("the checkpoint of", "step 4 ", "'optimizer'", "'model'")
    ):
        resumed.load_into(optimizer=torch.nn.Linear(3, 3))


def test_a_crash_after_going_back_does_not_resume_from_the_later_checkpoints(
    create: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step has ended; the restart names the same checkpoint again."""
    first = create(keep=9)
    for step in (1, 2, 3):
        first.save(step, {})
    first.close()
    path = tmp_path / "run/checkpoints/step_00000001"
    second = create()
    assert second.resume(path) is not None
    second.close()
    monkeypatch.setenv("MPIDDP_RESTART_COUNT", "1")
    again = create().resume(path)
    assert again is not None
    assert again.step == 1


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_records_of_another_program_are_refused(create: Open, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text("mine\n")
    with pytest.raises(mpiddp.UserError) as refused:
        create().resume()
    sentence = error("of another", f"{tmp_path}/run ", "metrics.jsonl")
    assert re.fullmatch(sentence, str(refused.value))
    assert (tmp_path / "run/metrics.jsonl").read_text() == "mine\n"


def test_an_unwritable_folder(create: Open, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    sentence = error("Name another folder", "file/run ", "Not a directory")
    with pytest.raises(mpiddp.UserError, match=sentence):
        create("file/run").resume()


# Resume from a path


def test_a_path_of_this_run_goes_back(create: Open, tmp_path: Path) -> None:
    first = create(keep=9)
    for step in (1, 2, 3):
        first.save(step, {"step": step})
    first.close()
    root = tmp_path / "run/checkpoints"
    back = create()
    resumed = back.resume(root / "step_00000001")
    assert resumed is not None
    assert resumed.state == {"step": 1}
    names = ["step_00000001", "step_00000002.old-1", "step_00000003.old-1"]
    assert sorted(each.name for each in root.iterdir()) == names
    back.save(2, {"step": "again"})
    back.close()
    resumed = create().resume()
    assert resumed is not None
    assert resumed.state == {"step": "again"}


def test_a_restart_does_not_go_back_again(
    create: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_by(create, 1, 2, folder="other")
    first = create(keep=9)
    for step in (1, 2):
        first.save(step, {})
    first.close()
    monkeypatch.setenv("MPIDDP_RESTART_COUNT", "1")
    resumed = create().resume(tmp_path / "run/checkpoints/step_00000001")
    assert resumed is not None
    assert resumed.step == 2


def test_a_path_of_another_run_counts_until_this_run_has_a_checkpoint(
    create: Open, tmp_path: Path
) -> None:
    other = create("other")
    other.save(5, {"from": "other"})
    other.close()
    for step, origin in ((5, "other"), (6, "own")):
        checkpoints = create()
        resumed = checkpoints.resume(tmp_path / "other")
        assert resumed is not None
        assert (resumed.step, resumed.state) == (step, {"from": origin})
        checkpoints.save(6, {"from": "own"})
        checkpoints.close()


def test_a_path_without_a_checkpoint(create: Open, tmp_path: Path) -> None:
    sentence = error("not found", "none ", str(Path.cwd()))
    with pytest.raises(mpiddp.UserError, match=sentence):
        create().resume(tmp_path / "none")
    with pytest.raises(mpiddp.UserError, match=error("contains no checkpoint", f"{tmp_path}: ")):
        create().resume(tmp_path)


RESUMES = """
import sys, mpiddp
print(mpiddp.Checkpoints(sys.argv[1]).resume().step, flush=True)
"""


def test_a_restart_whose_folder_stays_away_fails(
    create: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPIDDP_RUN_DIR", str(tmp_path / "run"))
    with pytest.raises(mpiddp.JobFailed) as failed:
        create().resume()
    sentence = error("not there", f"{tmp_path}/run ")
    assert re.fullmatch(sentence, str(failed.value))
    assert not (tmp_path / "run").exists()


# Records


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_records_of_repeated_steps_are_dropped(create: Open, tmp_path: Path) -> None:
    first = create()
    first.resume()
    assert mpiddp.run_dir() == tmp_path / "run"
    for step in (1, 2, 3):
        if step == 2:
            first.save(step, {})
        mpiddp.log_metrics(step, loss=torch.tensor(0.5), lr=np.float64(0.1), name="a", none=None)
    first.close()
    assert [each["step"] for each in records(tmp_path / "run")] == [1, 2, 3]
    assert records(tmp_path / "run")[0] == {
        "step": 1, "loss": 0.5, "lr": 0.1, "name": "a", "none": None,
    }  # fmt: skip
    current().run = None
    assert create().resume() is not None
    assert [each["step"] for each in records(tmp_path / "run")] == [1, 2]
    mpiddp.log_metrics(3, loss="again")
    assert [each["loss"] for each in records(tmp_path / "run")] == [0.5, 0.5, "again"]


def test_a_number_that_json_does_not_have_is_null(create: Open, tmp_path: Path) -> None:
    create().resume()
    mpiddp.log_metrics(1, loss=float("nan"), best=torch.tensor(float("inf")), lr=0.5)
    (line,) = (tmp_path / "run/metrics.jsonl").read_text().splitlines()

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    found = json.loads(line, parse_constant=refuse)
    assert found == {"step": 1, "loss": None, "best": None, "lr": 0.5}


def test_records_need_a_run(create: Open) -> None:
    sentence = error("yet. Create", "mpiddp.Checkpoints('runs/a')")
    with pytest.raises(mpiddp.UserError, match=sentence):
        mpiddp.run_dir()
    with pytest.raises(mpiddp.UserError, match=sentence):
        mpiddp.log_metrics(1, loss=2)
    checkpoints = create()
    with pytest.raises(mpiddp.UserError) as refused:
        mpiddp.log_metrics(1, loss=2)
    sentence = error("mpiddp.log_metrics: call", "Checkpoints.resume()")
    assert re.fullmatch(sentence, str(refused.value))
    checkpoints.resume()
    with pytest.raises(TypeError, match=r"loss: expected a number or a string, not list"):
        mpiddp.log_metrics(1, loss=[2])
    with pytest.raises(TypeError, match=r"step: expected a whole number, not 1.5"):
        mpiddp.log_metrics(1.5, loss=2)  # type: ignore[arg-type]


# The end of the script

SAVES = """
import os, sys, time, mpiddp, torch
checkpoints = mpiddp.Checkpoints(sys.argv[1], on_save_error="warn")
checkpoints.resume()
checkpoints.save(1, {"weight": torch.zeros(10_000_000)})
if sys.argv[2] == "full":
    while not os.path.exists(f"{sys.argv[1]}/checkpoints/step_00000001"):
        time.sleep(0.01)
    import mpiddp.checkpoints.save as files
    def write_files(*arguments):
        raise OSError(28, "No space left on device")
    files.write_files = write_files
    checkpoints.save(2, {})
if sys.argv[2] == "gone":
    checkpoints._wait_for_own_save()
    os.rename(f"{sys.argv[1]}/checkpoints", f"{sys.argv[1]}/elsewhere")
    os.symlink("x" * 300, f"{sys.argv[1]}/checkpoints")  # longer than a name may be
    checkpoints.save(2, {})
print("ends", flush=True)
if sys.argv[2] == "fork" and os.fork() == 0:
    sys.exit()
if sys.argv[2] == "error":
    raise ValueError("a bug")
sys.exit(0)
"""


FAILS = """
import sys, mpiddp, torch
import mpiddp.checkpoints.save as files
from mpiddp.errors import JobFailed
write_files = files.write_files
def full_disk(*arguments):
    raise OSError(28, "No space left on device")
files.write_files = full_disk
"""
EXITS_IN_THE_BODY = """
with mpiddp.Checkpoints(sys.argv[1]) as checkpoints:
    checkpoints.save(1, {})
    sys.exit(0)
"""
SAVES_AGAIN = """
checkpoints = mpiddp.Checkpoints(sys.argv[1], on_save_error="stop")
checkpoints.save(1, {})
try:
    checkpoints.save(2, {})
except JobFailed:
    files.write_files = write_files
    checkpoints.save(2, {})
"""


def test_a_last_save_that_fails_is_a_failure_also_at_an_exit_within_the_body(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAILS + EXITS_IN_THE_BODY, tmp_path / "run"],
        env=clean_env(), capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 1
    assert re.search(error(": step", "step 1 "), done.stderr), done.stderr


def test_a_step_whose_save_did_not_begin_may_be_saved_again(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAILS + SAVES_AGAIN, tmp_path / "run"],
        env=clean_env(), capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    folders = sorted(each.name for each in (tmp_path / "run/checkpoints").iterdir())
    assert folders == ["step_00000002"]


def end_of(tmp_path: Path, how: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", SAVES, tmp_path / "run", how],
        env=clean_env(), capture_output=True, text=True, timeout=PATIENCE_S
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("how", ["success", "fork"])
def test_the_end_of_a_script_waits_for_the_last_save(tmp_path: Path, how: str) -> None:
    code, stdout, stderr = end_of(tmp_path, how)
    assert (code, stdout, stderr) == (0, "ends\n", "")
    directory.verify(tmp_path / "run/checkpoints/step_00000001")
    assert not (tmp_path / "run/owner.json").exists()


def test_a_script_whose_last_save_fails_does_not_succeed(tmp_path: Path) -> None:
    code, stdout, stderr = end_of(tmp_path, "full")
    assert (code, stdout) == (1, "ends\n")
    values = (f"{tmp_path}/run/checkpoints: step 2 ", "step_00000001")
    sentence = error(": step", *values)
    assert re.fullmatch(rf"{sentence}\n", stderr), stderr


def test_a_last_save_into_a_folder_that_can_no_longer_be_read_fails(tmp_path: Path) -> None:
    code, stdout, stderr = end_of(tmp_path, "gone")
    assert (code, stdout) == (1, "ends\n")
    values = (f"{tmp_path}/run/checkpoints: ", "step 2", "File name too long")
    sentence = error("", *values)
    assert re.fullmatch(rf"{sentence}\n", stderr), stderr


def test_a_script_that_fails_keeps_its_last_save(tmp_path: Path) -> None:
    code, _, stderr = end_of(tmp_path, "error")
    assert (code, stderr.splitlines()[-1]) == (1, "ValueError: a bug")
    directory.verify(tmp_path / "run/checkpoints/step_00000001")
    assert not (tmp_path / "run/owner.json").exists()


def test_a_process_without_a_launcher_keeps_its_environment(create: Open) -> None:
    before = dict(os.environ)
    create().resume()
    assert dict(os.environ) == before
