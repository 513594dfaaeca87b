"""Who waits for whom in collectives, and which rank is a straggler."""

from collections.abc import Sequence
from typing import Any

import pytest

from mpiddp.launch.judge.calls import find_wait, last_call_with
from mpiddp.launch.judge.events import Record
from mpiddp.launch.judge.hangs import next_look_at
from mpiddp.launch.judge.stragglers import find_stragglers, straggler_sentence
from mpiddp.protocol.server import Event
from tests.support.channels import calls, progress

REDUCE = "all_reduce (float32, 1,048,576)"


class Job:
    """Ranks on hosts a, b, c, … that call collectives, and the looks of the launcher."""

    def __init__(self, ranks: int = 4, timeout_s: float | None = None) -> None:
        hosts = [chr(97 + rank) for rank in range(ranks)]
        self.record = Record(hosts, at=0.0, hang_timeout_s=timeout_s)
        self.skew_s = [0.0, 5.0, -3600.0, 0.2][:ranks]  # of the ranks' clocks

    def tells(self, at: float, *of_ranks: Sequence[tuple[int, str, float, bool]]) -> None:
        """Each rank tells its calls of the group of all: number, kind, when, and whether it has ended."""
        for rank, made in enumerate(of_ranks):
            self.tell(rank, at, {"0:gloo": (None, made)})

    def tell(self, rank: int, at: float, groups: Any) -> None:
        """A rank tells its calls of each group."""
        facts = calls(groups, at, skew_s=self.skew_s[rank])
        self.record.add(Event("calls", rank, facts, at, from_script=True))


REDUCE_31 = "all_reduce no. 31 (float32, 1,048,576)"
ENTERED, LEFT = [(30, REDUCE, 9.0, True), (31, REDUCE, 10.0, False)], [(30, REDUCE, 9.0, True)]


def test_a_call_that_all_ranks_have_entered_is_no_wait():
    """Its transfer is slow, or a GPU: nobody is missing. Two groups at once are no different calls."""
    job = Job(4)
    for rank in range(4):
        members = [0, 1] if rank < 2 else [2, 3]
        job.tell(rank, 20.0, {f"{members[0]}:nccl": (members, [(1, REDUCE, 5.0, False)])})
    assert job.record.wait is None


def test_a_call_of_other_ranks_does_not_prove_that_a_host_lives():
    """Ranks that go on in a group without a rank, such as an evaluation, do not wait for it."""
    job = Job(3)
    shared, alone = [(1, REDUCE, 5.0, True)], [(1, REDUCE, 19.0, False)]
    job.tell(0, 20.0, {"0:gloo": (None, shared), "1:gloo": ([0, 1], alone)})
    groups = job.record.calls[0]
    assert last_call_with({2}, groups) == pytest.approx(5.0)
    assert last_call_with({1}, groups) == pytest.approx(19.0)
    assert last_call_with({1}, {}) == float("-inf")


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        (REDUCE, "all_reduce (float32, 4)", False),
        (REDUCE, "all_reduce (float16, 1,048,576)", False),
        ("scatter (float32, 8)", "scatter", True),  # of the rank that has nothing to give
        ("all_to_all (float32, 3)", "all_to_all (float32, 5)", True),
    ],
)
def test_the_sizes_of_some_calls_may_differ(first, second, is_same):
    job = Job(2)
    job.tells(20.0, [(1, first, 1.0, False)], [(1, second, 1.0, False)])
    assert (find_wait(job.record.calls, 2, [0, 1]) is None) is is_same


def test_the_first_of_several_waits_is_named():
    """Rank 0 waits for rank 1 in a group of two, and all others for both."""
    job = Job(3)
    entered, left = (([0, 1], [(8, "barrier", 12.0, False)]), ([0, 1], [(7, "barrier", 5.0, True)]))
    job.tell(0, 20.0, {"0:gloo": (None, LEFT), "1:gloo": entered})
    job.tell(1, 20.0, {"0:gloo": (None, LEFT), "1:gloo": left})
    job.tell(2, 20.0, {"0:gloo": (None, ENTERED)})
    wait = find_wait(job.record.calls, 3, [0, 1, 2])
    assert (wait.call, wait.waiting, wait.missing) == (REDUCE_31, [2], [0, 1])
    assert find_wait(job.record.calls, 3, []) is None  # these may have moved on meanwhile


def test_ranks_that_wait_for_each_other_in_two_groups():
    """As in a collective of another group under `if rank == 0`."""
    job = Job(2)
    mistake = (None, [(1, "barrier", 9.5, False)])
    job.tell(0, 20.0, {"0:gloo": (None, LEFT), "1:gloo": mistake})
    job.tell(1, 20.0, {"0:gloo": (None, ENTERED)})
    wait = find_wait(job.record.calls, 2, [0, 1])
    assert wait.calls == {"barrier no. 1": [0], REDUCE_31: [1]}


def test_a_thread_that_waits_while_the_training_goes_on_is_no_wait():
    """As in a save of 5 minutes in the background, whose end all ranks of another group await."""
    job = Job(2)
    saves = {rank: {"1:gloo": (None, made)} for rank, made in ((0, []), (1, ENTERED[1:]))}
    for at in (20.0, 60.0, 85.0):
        trains = [(number, REDUCE, number * 1.0, True) for number in range(1, int(at))]
        for rank in range(2):
            job.tell(rank, at, {**saves[rank], "0:gloo": (None, trains)})
        assert next_look_at(job.record) == at - 1 + 60.0
    assert next_look_at(job.record) == 144.0  # 60 s after the last call of the training: it hangs


def test_calls_that_go_on_are_signs_of_life():
    job = Job(2, timeout_s=100.0)
    job.record.add(Event("progress", 0, progress(1), 1.0))
    going = [(number, REDUCE, number * 1.0, True) for number in range(10, 50)]
    job.tells(50.0, going, going)
    assert next_look_at(job.record) == 149.0


# --- stragglers ---


def found_in(record: Record, since: float, now: float) -> dict[str, Any] | None:
    return find_stragglers(record.calls, record.world_size, since, now)


def windows(own_s: Sequence[float], *, buckets: int = 1, step_s: float = 0.0) -> list[str]:
    """What is said in four windows of ranks that work so long in each step, and then wait for each other."""
    job, sentences, now, found = Job(len(own_s)), [], 0.0, list[dict[str, Any]]()
    since, made, number = 0.0, [list[tuple[int, str, float, bool]]() for _ in own_s], 0
    while len(sentences) < 4:
        for bucket in range(buckets):
            number += 1
            for rank, work_s in enumerate(own_s):
                made[rank].append((number, REDUCE, now + work_s + bucket * 0.001, True))
        now += max(*own_s, step_s) + buckets * 0.001
        if now >= since + 10:
            job.tells(now, *(calls[-128:] for calls in made))
            if (window := found_in(job.record, since, now)) is not None:
                found.append(window)
                sentences.append(straggler_sentence(job.record, found)[1])
                since = now
    return sentences


def test_a_slow_rank_is_named_after_three_windows_with_its_share():
    """Clocks of hosts differ by an hour. Several collectives of one step count once."""
    for buckets in (1, 20):
        *early, third, _ = windows([0.05, 0.05, 0.1, 0.04], buckets=buckets)
        assert early == ["", ""]
        share = 50 if buckets == 1 else 58  # of a step of 101 and of 120 ms
        assert (
            third == f"rank 2 on c is a straggler: the others wait for it in {share}% of the time."
        )


def test_a_clock_that_drifts_makes_no_straggler():
    """By 50 microseconds a second, as without NTP: by 0.2 s in an hour."""
    job = Job(2)
    for at in range(0, 3600, 10):
        job.skew_s = [-5e-5 * at, 0.0]
        made = [(number, REDUCE, number / 10, True) for number in range(at * 10, at * 10 + 100)]
        job.tells(at + 10.0, made, made)
    assert found_in(job.record, 3590.0, 3600.0) == {"ranks": [], "share": 0.0}


def test_two_slow_ranks_are_named():
    sentence = windows([0.05, 0.05, 0.1, 0.09])[-1]
    assert sentence.startswith(
        "rank 2 on c, rank 3 on d are stragglers: the others wait for them in "
    )


@pytest.mark.parametrize(
    ("own_s", "step_s"),
    [
        ([0.1, 0.1, 0.11, 0.1], 0.0),  # too little
        ([0.1, 0.1005, 0.1, 0.1], 0.0),  # less than clocks tell
        ([0.01, 0.01, 0.03, 0.01], 0.2),  # something else takes the time of all ranks
        ([0.05, 0.1, 0.1, 0.1], 0.0),  # one is faster
    ],
)
def test_equal_ranks_are_not_named(own_s, step_s):
    assert windows(own_s, step_s=step_s) == [""] * 4


def test_a_long_evaluation_of_one_rank_is_no_straggler():
    """It fills one window, and the next ones have nothing of it."""
    job, since, sentences, found = Job(2), 0.0, list[str](), list[dict[str, Any]]()
    came = [*range(60), 240, *range(241, 300)]  # of rank 0; the other has waited from 60 on
    made = [(number, REDUCE, float(at), True) for number, at in enumerate(came)]
    waited = [*made[:60], (60, REDUCE, 60.0, True), *made[61:]]
    for count, at in enumerate(came, 1):
        job.tells(float(at), made[:count], waited[:count])
        if at >= since + 10 and (window := found_in(job.record, since, at)) is not None:
            found.append(window)
            since = float(at)
            sentences.append(straggler_sentence(job.record, found)[1])
    assert len(sentences) > 5
    assert not any(sentences)


def test_nobody_is_slow_in_a_job_that_calls_nothing_any_more():
    job = Job(2)
    assert found_in(job.record, 0.0, 59.0) is None
    assert found_in(job.record, 0.0, 60.0) == {"ranks": [], "share": 0.0}


def test_a_group_that_no_rank_tells_any_more_is_forgotten():
    job = Job(2)
    for at in range(100):
        for rank in (0, 1):
            job.tell(rank, at, {f"{at}:gloo": (None, [(1, "barrier", at, True)])})
    assert [len(groups) for groups in job.record.calls.values()] == [1, 1]
