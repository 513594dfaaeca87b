"""When the launcher asks for the stacks of the ranks, and when these hang.

Tests mpiddp/launch/{places,watch}.py.
"""

import random
from pathlib import Path

import pytest

import mpiddp
from mpiddp.launch.events import Record
from mpiddp.launch.places import place_of
from mpiddp.launch.watch import hang_sentences, next_look_at, places_sentence
from mpiddp.protocol.server import Event
from tests.support.channels import progress, stacks

SITE = "/venv/lib/python3.11/site-packages"
OURS = str(Path(mpiddp.__file__).parent)
ALL_REDUCE = [
    ("/home/me/train.py", 88, "step", "dist.all_reduce(loss)"),
    (f"{SITE}/torch/distributed/c10d_logger.py", 83, "wrapper", "return func(*args, **kwargs)"),
    (f"{SITE}/torch/distributed/distributed_c10d.py", 2806, "all_reduce", "work.wait()"),
]
BACKWARD = [
    ("/home/me/train.py", 60, "step", "loss.backward()"),
    (f"{SITE}/torch/_tensor.py", 630, "backward", "torch.autograd.backward("),
    (f"{SITE}/torch/autograd/graph.py", 825, "_engine_run_backward", "return Variable._execution"),
]
OPENS = [
    ("/home/me/train.py", 70, "main", "batch = next(batches)"),
    ("/home/me/data.py", 40, "load", "with open(path) as file:"),
]
LOADS = [
    ("/home/me/train.py", 70, "main", "batch = next(batches)"),
    (f"{SITE}/torch/utils/data/dataloader.py", 1140, "_try_get_data", "data = self._queue.get()"),
    ("/usr/lib/python3.11/multiprocessing/queues.py", 113, "get", "if not self._poll(timeout):"),
]
Frames = list[tuple[str, int, str, str]]


def stack(frames: Frames) -> str:
    lines = [
        f'  File "{file}", line {line}, in {name}\n    {code}\n'
        for file, line, name, code in frames
    ]
    watch = f'thread watch:\n  File "{OURS}/runtime/x.py", line 1, in run\n    pass\n'
    return f"thread MainThread:\n{''.join(lines)}\n{watch}"


class Job:
    """Ranks on hosts a, b, c, …, a clock, and the looks of the watch at their stacks."""

    def __init__(self, ranks: int = 3, timeout_s: float | None = None) -> None:
        hosts = [chr(ord("a") + rank) for rank in range(ranks)]
        self.now = 1000.0
        self.record = Record(hosts, at=self.now, hang_timeout_s=timeout_s)
        self.printed_at = self.now
        self.stacks: dict[int, Frames] = {}
        self.cpu_s = dict.fromkeys(range(ranks), 0.0)
        self.busy: set[int] = set()  # ranks that compute
        self.cores = 1.0  # that each of them gets
        self.looks = 0
        self.said: set[str] = set()

    def note(self, rank: int, kind: str, **facts: object) -> None:
        self.record.add(Event(kind, rank, facts, self.now, kind == "stacks"))

    def steps(self, count: int, every_s: float) -> None:
        """All ranks make steps, at most two of which are reported in a second."""
        first = self.record.newest_step
        unreported_s = 0.0
        for step in range(first + 1, first + count + 1):
            unreported_s += every_s
            if unreported_s >= 0.5:
                assert self.after(unreported_s) == ""
                unreported_s = 0.0
                for rank in self.cpu_s:
                    self.note(rank, "progress", **progress(step))
        assert self.after(unreported_s) == ""

    def after(self, seconds: float) -> str:
        """What is said within the next seconds."""
        end, said = self.now + seconds, ""
        while self.now < end:
            passed = min(1.0, end - self.now)
            self.now += passed
            for rank in self.busy:
                self.cpu_s[rank] += self.cores * passed
            if self.printed_at != self.record.began_at:
                self.record.add(Event("printed", at=self.printed_at))
            if self.now >= next_look_at(self.record):
                self.looks += 1
                self.record.note("asked", ranks=[*self.cpu_s])
                for rank, frames in self.stacks.items():
                    state = "R" if rank in self.busy else "S"
                    facts = stacks(stack(frames), cpu_s=self.cpu_s[rank], state=state)
                    self.note(rank, "stacks", **facts)
                self.record.add(Event("looked", at=self.now))
                for about, sentence in hang_sentences(self.record).items():
                    said += sentence * (about not in self.said)
                    self.said.add(about)
        return said


def test_one_rank_makes_the_others_wait():
    job = Job(16)
    job.steps(50, every_s=0.2)
    job.stacks = dict.fromkeys(range(16), ALL_REDUCE) | {11: OPENS}
    assert job.after(59) == ""
    assert job.after(30) == (
        "no rank has made a step for 70 s: 15 ranks wait in all_reduce (train.py:88); rank 11 on l is in "
        "load (data.py:40): with open(path) as file."
    )
    assert job.after(3600) == ""  # it is said once
    job.steps(1, every_s=1)
    assert "rank 11 on l is in load" in job.after(100)


@pytest.mark.parametrize("timeout_s", [None, 100.0])
def test_a_script_that_counts_its_steps_anew_does_not_hang(timeout_s):
    """In each epoch, or each fold."""
    job = Job(2, timeout_s)
    job.stacks = {0: BACKWARD, 1: OPENS}
    for _ in range(3):
        for step in range(1, 50):
            assert job.after(2) == ""
            for rank in (0, 1):
                job.note(rank, "progress", **progress(step))
    assert "rank 1 on b" in job.after(400)


@pytest.mark.parametrize("cause", ["moves", "computes", "computes, then saves", "starves", "saves"])
def test_a_job_that_works_between_its_steps_does_not_hang(cause):
    """One rank evaluates, compiles or saves for four minutes, and the others wait for it."""
    job = Job(2)
    job.steps(50, every_s=0.5)
    job.stacks = {0: OPENS, 1: ALL_REDUCE}
    if cause.startswith(("computes", "starves")):
        job.busy = {0}
        job.cores = 0.1 if cause == "starves" else 1.0
    elif cause == "saves":
        job.note(0, "saving", active=True)
    for line in range(240):
        if cause == "moves":
            job.stacks[0] = [("/home/me/train.py", line, "evaluate", "predict(batch)")]
        assert job.after(1) == ""
    assert job.looks >= 4
    if cause == "computes, then saves":
        job.busy = set()
        job.note(0, "saving", active=True)
        assert {job.after(1) for _ in range(120)} == {""}
    if "saves" in cause:
        job.note(0, "saving", active=False)
    job.steps(50, every_s=0.5)


def test_with_a_time_limit_only_steps_count():
    job = Job(2, 100.0)
    job.stacks = {0: BACKWARD, 1: OPENS}
    job.note(0, "saving", active=True)
    for rank in (0, 1):
        job.note(rank, "progress", **progress(0))
    assert job.after(90) == ""
    job.note(0, "saving", active=False)
    assert "rank 1 on b" in job.after(20)


def test_a_rank_that_computes_for_ever_in_one_line_is_named_later():
    job = Job(2)
    job.steps(50, every_s=0.5)
    job.stacks, job.busy = {0: OPENS, 1: ALL_REDUCE}, {0}
    assert job.after(290) == ""
    assert "rank 0 on a is in load" in job.after(100)


def test_a_job_without_steps_hangs_when_ranks_wait_and_nothing_is_printed():
    job = Job(2)
    job.stacks = {0: ALL_REDUCE, 1: OPENS}
    for _ in range(10):  # a slow start that prints
        assert job.after(50) == ""
        job.printed_at = job.now
    assert job.after(100) == (
        "no rank has made a step or printed anything for 70 s: "
        "rank 0 on a waits in all_reduce (train.py:88); "
        "rank 1 on b is in load (data.py:40): with open(path) as file."
    )


def test_ranks_that_have_ended_are_not_waited_for():
    job = Job(2)
    job.steps(5, every_s=1)
    job.stacks = {0: ALL_REDUCE}
    job.note(1, "done")
    assert job.after(100).endswith(
        ": rank 0 on a waits in all_reduce (train.py:88); rank 1 on b has finished."
    )


def test_100_000_steps_of_all_kinds_raise_no_alarm():
    """Steps of 5 ms to 20 s, a slow first one, evaluations and recompilations of up to four minutes."""
    job, random_ = Job(4), random.Random(1)
    job.stacks = {0: LOADS, 1: BACKWARD, 2: BACKWARD, 3: BACKWARD}
    job.busy = {0}
    assert job.after(200) == ""  # the first step compiles
    made = 0
    while made < 100_000:
        job.stacks[0] = LOADS
        count = random_.choice([500, 2000, 5000])
        job.steps(count, every_s=random_.choice([0.005, 0.02, 0.3]))
        made += count
        job.steps(3, every_s=random_.choice([1.0, 20.0]))
        job.stacks[0] = [("/home/me/train.py", made, "evaluate", "predict(batch)")]
        for _ in range(random_.randrange(240)):
            if random_.random() < 0.5:
                job.stacks[0] = [
                    ("/home/me/train.py", random_.randrange(500), "evaluate", "predict(batch)")
                ]
            assert job.after(1) == ""


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([("/home/me/data.py", 40, "load", "for each in files():")],
         "load (data.py:40): for each in files()"),
        ([("/home/me/data.py", 40, "load", "max")], "load (data.py:40): max"),
        ([("/home/me/data.py", 40, "load", f"f({'x, ' * 30})")], f"load (data.py:40): f({'x, ' * 19}x …"),
        ([("/home/me/data.py", 40, "load", "")], "load (data.py:40)"),
        ([(f"{SITE}/a/x.py", 1, "first", "a()"), (f"{SITE}/b/y.py", 2, "last", "b()")],
         "last (y.py:2): b()"),
        # A save that the other ranks do not make: the script's line, in a folder of any name.
        ([("/home/mpiddp/checkpoints/train.py", 8, "<module>", "checkpoints.save(1, state)"),
          (f"{OURS}/checkpoints/checkpoints.py", 1, "save", "start(self._run, step)"),
          (f"{OURS}/checkpoints/run.py", 2, "gather", "return self.coordinator.all_gather_json(value)"),
          (f"{OURS}/runtime/job/coordinator.py", 3, "ask", "self._changed.wait()"),
          ("/usr/lib/python3.11/threading.py", 4, "wait", "waiter.acquire()")],
         "save (train.py:8)"),
        ([(f"{OURS}/train/loop.py", 5, "train", "loss.item()")], "train (loop.py:5): loss.item()"),
    ],
)  # fmt: skip
def test_the_place_of_a_rank_in_words(frames, text):
    found = place_of(stacks(stack(frames).replace("\n    \n", "\n")))
    assert found.text == text


def test_a_job_that_moves_while_its_stacks_are_on_their_way_goes_on():
    """A rank that answers late, in native code, has made a step since the question."""
    record = Record(["a"], at=0.0, hang_timeout_s=60.0)
    record.add(Event("progress", 0, progress(1), 0.0))
    assert next_look_at(record) == 60.0
    record.add(Event("progress", 0, progress(2), 61.0))
    assert next_look_at(record) == 121.0


@pytest.mark.parametrize("order", [(False, True), (True, False)])
def test_the_answer_of_a_script_counts_although_it_is_late(order):
    """Its agent, which the launcher has asked meanwhile, answers for it as well."""
    record = Record(["a"])
    for from_script in order:
        facts = stacks(stack(LOADS if from_script else OPENS))
        record.add(Event("stacks", 0, facts, 5.0, from_script))
    assert record.stacks[0]["text"] == stack(LOADS)


EVALUATES = [
    ("/home/me/train.py", 95, "evaluate", "predicted = model(batch)"),
    (f"{SITE}/torch/nn/modules/module.py", 1780, "_call_impl", "return forward_call(*args)"),
    (f"{SITE}/torch/nn/functional.py", 6400, "multi_head_attention_forward", "attn = linear(x)"),
]


@pytest.mark.parametrize("waiting", [(), (1, 2)])
@pytest.mark.parametrize("steps", [0, 50])
def test_ranks_that_compute_in_torch_are_not_accused(waiting, steps):
    """Rank 0 evaluates while the others wait, all evaluate, or all infer without an optimizer."""
    job = Job(3)
    job.steps(steps, every_s=0.5)
    job.stacks = dict.fromkeys(range(3), EVALUATES) | dict.fromkeys(waiting, ALL_REDUCE)
    job.busy = {0, 1, 2} - {*waiting}
    assert job.after(280) == ""
    sentence = places_sentence(job.record, range(3))
    assert "rank 0 on a" in sentence
    assert "rank 0 on a waits" not in sentence


def test_training_in_a_thread_is_named_by_that_thread():
    joins = [
        ("/home/me/train.py", 10, "main", "thread.join()"),
        ("/usr/lib/python3.11/threading.py", 1112, "join", "self._wait_for_tstate_lock()"),
    ]
    trains = stack(ALL_REDUCE).replace("MainThread", "Thread-1 (train)")
    found = place_of(stacks(f"{stack(joins)}\n{trains}"))
    assert found.text == "all_reduce (train.py:88)"
