"""When the launcher asks for the stacks of the ranks, what it says of them, and when it says nothing."""

from pathlib import Path

import pytest

import mpiddp
from mpiddp.launch.judge.events import Record
from mpiddp.launch.judge.hangs import find_hang, next_look_at
from mpiddp.launch.judge.stacks import place_of, stacks_of_script
from mpiddp.protocol.server import Event
from tests.support.channels import calls, progress

SITE = "/venv/lib/python3.11/site-packages"
OURS = str(Path(mpiddp.__file__).parent)
ALL_REDUCE = [
    ("/home/me/train.py", 88, "step", "dist.all_reduce(loss)"),
    (f"{SITE}/torch/distributed/c10d_logger.py", 83, "wrapper", "return func(*args, **kwargs)"),
    (f"{SITE}/torch/distributed/distributed_c10d.py", 2806, "all_reduce", "work.wait()"),
]
EVALUATES = [
    ("/home/me/train.py", 95, "evaluate", "predicted = model(batch)"),
    (f"{SITE}/torch/nn/modules/module.py", 1780, "_call_impl", "return forward_call(*args)"),
]
OPENS = [
    ("/home/me/train.py", 70, "main", "batch = next(batches)"),
    ("/home/me/data.py", 40, "load", "with open(path) as file:"),
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
    """Ranks on hosts a, b, c, …, a clock, and the launcher's looks at their stacks."""

    def __init__(self, ranks: int = 3, timeout_s: float | None = None) -> None:
        hosts = [chr(ord("a") + rank) for rank in range(ranks)]
        self.now = 1000.0
        self.record = Record(hosts, at=self.now, hang_timeout_s=timeout_s)
        self.looked_at, self.printed_at = 0.0, self.now
        self.stacks: dict[int, Frames] = {}
        # Ranks in a collective that others have not entered.
        self.waits_since: dict[int, float] = {}
        self.looks = 0
        self.printed: set[str] = set()

    def note(self, rank: int, kind: str, **facts: object) -> None:
        self.record.add(Event(kind, rank, facts, self.now, kind == "stacks"))

    def steps(self, count: int) -> None:
        """All ranks make steps, two in a second."""
        first = self.record.newest_step + 1
        for step in range(first, first + count):
            assert self.after(0.5) == ""
            for rank in range(self.record.world_size):
                self.note(rank, "progress", **progress(step))

    def tell_calls(self) -> None:
        for rank in range(self.record.world_size) if self.waits_since else ():
            since = self.waits_since.get(rank)
            made = [] if since is None else [(7, "barrier", since, False)]
            self.note(rank, "calls", **calls({"0:gloo": (None, made)}, self.now))

    def after(self, seconds: float) -> str:
        """What is said within the next seconds."""
        end, sentences = self.now + seconds, ""
        while self.now < end:
            self.now += min(1.0, end - self.now)
            if int(self.now) % 10 == 0:
                self.tell_calls()
            if self.now >= next_look_at(self.record, self.looked_at, self.printed_at):
                self.looks += 1
                self.record.add(Event("asked", at=self.now))
                self.tell_calls()
                for rank, frames in self.stacks.items():
                    self.note(rank, "stacks", text=stack(frames) if frames else "")
                if (hang := find_hang(self.record, self.printed_at)) is not None:
                    self.looked_at = self.now
                    sentences += f"{hang.sentence}{hang.stacks}" * (hang.about not in self.printed)
                    self.printed.add(hang.about)
        return sentences


# --- no false alarm ---


def test_a_script_that_counts_its_steps_anew_does_not_hang():
    """In each epoch, or each fold."""
    job = Job(2, 100.0)
    for _ in range(3):
        for step in range(1, 50):
            assert job.after(2) == ""
            for rank in (0, 1):
                job.note(rank, "progress", **progress(step))
    assert "no rank has made a step" in job.after(100)


@pytest.mark.parametrize("timeout_s", [None, 400.0])
@pytest.mark.parametrize("cause", ["evaluates", "saves", "evaluates, then saves"])
def test_a_job_that_works_between_its_steps_does_not_hang(cause, timeout_s):
    """One rank evaluates or saves for four minutes, and the others wait for it outside of collectives."""
    job = Job(2, timeout_s)
    job.steps(50)
    job.stacks = {0: EVALUATES, 1: ALL_REDUCE}
    if cause == "saves":
        job.note(0, "saving", active=True)
    assert job.after(240) == ""
    if cause == "evaluates, then saves":
        job.note(0, "saving", active=True)
        assert job.after(240) == ""
    if "saves" in cause:
        job.note(0, "saving", active=False)
    job.steps(50)
    assert job.looks == 0


def test_a_command_shows_no_line():
    job = Job(2, 100.0)
    job.stacks = {0: [], 1: []}  # its agent has answered
    assert job.after(110).endswith(": rank 0 on a, rank 1 on b run a command.")


def test_a_job_that_makes_no_steps_is_never_called_quiet():
    """It infers, or it is a program without torch. Only a limit of the user ends it."""
    job = Job(2)
    assert job.after(24 * 3600) == ""
    assert job.looks == 0


def test_a_job_that_moves_while_its_stacks_are_on_their_way_goes_on():
    """A rank that answers late, in native code, has made a step since the question."""
    record = Record(["a"], at=0.0, hang_timeout_s=60.0)
    record.add(Event("progress", 0, progress(1), 0.0))
    assert next_look_at(record) == 60.0
    record.add(Event("asked", at=60.0))
    record.add(Event("progress", 0, progress(2), 61.0))
    record.add(Event("stacks", 0, {"text": stack(OPENS)}, 62.0))
    assert find_hang(record) is None
    assert next_look_at(record) == 121.0


# --- a silence ---


def test_a_job_without_steps_for_5_minutes_is_told_with_all_places_and_no_judgement():
    job = Job(16)
    job.steps(50)
    job.stacks = dict.fromkeys(range(16), ALL_REDUCE) | {11: OPENS}
    assert job.after(299) == ""
    assert job.after(3600) == (
        "no rank has made a step for 300 s: 15 ranks are in step (train.py:88): dist.all_reduce(loss); "
        "rank 11 on l is in load (data.py:40): with open(path) as file."
    )
    job.steps(1)
    assert "rank 11 on l is in load" in job.after(400)


def test_before_the_first_step_what_the_job_prints_counts():
    job = Job(2, 60.0)
    job.stacks = {0: ALL_REDUCE, 1: OPENS}
    for _ in range(10):  # a slow start that prints
        assert job.after(50) == ""
        job.printed_at = job.now
    assert job.after(100).startswith("no rank has made a step or printed anything for 60 s: ")


# --- a wait for ranks that have not entered a collective ---


def test_who_has_not_entered_a_collective_is_named_once_per_place():
    job = Job(3)
    job.steps(50)
    job.stacks = dict.fromkeys(range(3), ALL_REDUCE) | {1: EVALUATES}
    for part in ("rank 1 on b has not entered barrier no. 7, ", ""):  # a second evaluation
        job.waits_since = dict.fromkeys((0, 2), job.now)
        assert job.after(59) == ""
        assert job.after(150).startswith(part)
        job.waits_since = {}
        job.record.calls.clear()
        job.steps(50)
    job.stacks[1], job.waits_since = OPENS, dict.fromkeys((0, 2), job.now)
    sentence, stack_of_1 = job.after(200).split("\nThe Python stack of rank ")
    assert sentence == (
        "rank 1 on b has not entered barrier no. 7, for which ranks 0, 2 have waited 60 s; "
        "it is in load (data.py:40): with open(path) as file."
    )
    assert stack_of_1 == f"1:\n{stacks_of_script(stack(OPENS))}"
    assert "have waited 300 s; it is in load" in job.after(200)
    assert job.after(3600) == ""


def test_who_has_not_come_to_the_group_is_named_with_all_places():
    job = Job(3)
    for rank in (0, 2):
        job.note(rank, "forming", active=True)
    job.stacks = {0: EVALUATES, 1: OPENS, 2: EVALUATES}
    assert job.after(59) == ""
    assert job.after(60).partition("\n")[0] == (
        "rank 1 on b has not entered init_process_group, for which ranks 0, 2 have waited 60 s; "
        "rank 0 on a, rank 2 on c are in evaluate (train.py:95): predicted = model(batch); "
        "rank 1 on b is in load (data.py:40): with open(path) as file."
    )
    job.note(1, "forming", active=True)
    assert next_look_at(job.record, job.looked_at) == float("inf")
    for rank in range(3):
        job.note(rank, "forming", active=False)
    assert job.record.forming_wait is None


def test_threads_of_libraries_do_not_hide_the_sentence():
    """A progress bar's thread and a queue's are left out; a thread that executes the script's lines stays."""

    def thread(name: str, *frames: tuple[str, int, str, str]) -> str:
        return stack([*frames]).partition("\n\n")[0].replace("MainThread", name)

    monitor = thread(
        "tqdm_monitor", (f"{SITE}/tqdm/_monitor.py", 69, "run", "self.was_killed.wait()")
    )
    feeder = thread("QueueFeederThread", ("/usr/lib/python3.11/queue.py", 9, "_feed", "wait()"))
    main, loader = thread("MainThread", *ALL_REDUCE), thread("loader", *OPENS)
    text = "\n\n".join([main, monitor, loader, feeder])
    assert stacks_of_script(text) == f"{main}\n\n{loader}"


def test_ranks_that_answer_late_are_asked_again():
    job = Job(2)
    job.waits_since, job.stacks = {0: job.now}, {0: ALL_REDUCE, 1: OPENS}
    job.tell_calls()
    tell, job.tell_calls = job.tell_calls, lambda: None
    assert job.after(65) == ""
    job.tell_calls = tell
    assert job.after(10).startswith("rank 1 on b has not entered barrier no. 7")


# --- places in words ---


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
          (f"{OURS}/checkpoints/run_folder.py", 2, "gather", "return self.coordinator.gather(value)"),
          (f"{OURS}/runtime/job/coordinator.py", 3, "ask", "self._changed.wait()"),
          ("/usr/lib/python3.11/threading.py", 4, "wait", "waiter.acquire()")],
         "<module> (train.py:8): checkpoints.save(1, state)"),
        ([(f"{OURS}/train/loop.py", 5, "train", "loss.item()")], "train (loop.py:5): loss.item()"),
    ],
)  # fmt: skip
def test_the_place_of_a_rank_in_words(frames, text):
    assert place_of(stack(frames).replace("\n    \n", "\n")) == text


def test_training_in_a_thread_is_named_by_that_thread():
    joins = [
        ("/home/me/train.py", 10, "main", "thread.join()"),
        ("/usr/lib/python3.11/threading.py", 1112, "join", "self._wait_for_tstate_lock()"),
    ]
    trains = stack(ALL_REDUCE).replace("MainThread", "Thread-1 (train)")
    assert place_of(f"{stack(joins)}\n{trains}") == "step (train.py:88): dist.all_reduce(loss)"


@pytest.mark.parametrize("order", [(False, True), (True, False)])
def test_the_answer_of_a_script_counts_although_it_is_late(order):
    """Its agent, which the launcher has asked meanwhile, answers for it as well."""
    record = Record(["a"])
    for from_script in order:
        facts = {"text": stack(ALL_REDUCE if from_script else OPENS)}
        record.add(Event("stacks", 0, facts, 5.0, from_script))
    assert record.stacks[0]["text"] == stack(ALL_REDUCE)
