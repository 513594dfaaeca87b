"""tests/tiers.py finds the tests that need real ranks or the cluster.

Tests tests/tiers.py.
python -m pytest tests/test_tiers.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import (
    test_batching_benchmark,
    test_gpt,
    test_hostfile,
    test_launch,
    test_launch_hosts,
    test_restarts,
    test_resume,
    test_run,
    test_stop,
    test_test_hosts,
    test_test_slurm,
)
from tests.tiers import LONGEST_FIRST, starts_ranks, uses_cluster


@pytest.mark.parametrize(
    ("function", "ranks", "in_cluster"),
    [
        (test_hostfile.test_fuzzed_bytes_are_parsed_or_refused, False, False),
        (test_stop.test_grace_accepts_times_with_units, False, False),
        # It uses a global list.
        (test_stop.test_under_nohup_sighup_is_ignored_and_sigterm_stops, True, False),
        (test_stop.test_sigusr1_through_a_raw_mpirun_stops_the_job, True, False),
        # It has strings of a command.
        (test_stop.test_a_training_without_a_launcher_saves_and_stops, True, False),
        (test_run.test_without_a_launcher_a_script_is_a_job_of_one_rank, True, False),
        (test_launch.test_exit_codes, True, False),
        (test_batching_benchmark.test_a_rehearsal_with_two_ranks, True, False),
        (test_gpt.test_the_same_bits_under_every_launcher, True, False),  # in a dict of lists
        (test_launch.test_this_machine_needs_no_hostfile, True, False),  # in an inner function
        (test_restarts.test_too_few_hosts_are_an_error, True, False),  # its fixture has the hosts
        (test_test_hosts.test_nothing_is_left_behind, False, True),
    ],
)
def test_starts_ranks_and_uses_cluster(
    function: Callable[..., None], ranks: bool, in_cluster: bool
) -> None:
    assert (starts_ranks([function]), uses_cluster([function])) == (ranks, in_cluster)


def test_a_fixture_of_waiting_ranks_starts_ranks() -> None:
    assert starts_ranks([test_resume.pool._get_wrapped_function()])


def test_a_fixture_of_hosts_needs_the_cluster() -> None:
    for fixture in (test_launch_hosts.hosts, test_test_hosts.odd_hosts, test_test_slurm.two_hosts):
        assert uses_cluster([fixture._get_wrapped_function()])


def test_a_test_has_the_markers_of_its_fixtures(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        if "hosts" in getattr(item, "fixturenames", ()):
            assert item.get_closest_marker("cluster"), item.nodeid


def test_the_files_that_take_longest_exist() -> None:
    for name in LONGEST_FIRST:
        assert Path(__file__).with_name(f"test_{name}.py").exists(), name
