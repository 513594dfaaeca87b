"""The sizes of `mpiddp.mesh`, and its check that tensor-parallel groups lie inside hosts.

tests/promises/test_python.py has the groups of real ranks.
"""

import re

import pytest

from mpiddp.runtime.torch.device_mesh import check_sizes, resolve
from tests.support.errors import error, refusal

HOSTS = [f"h{number}" for number in range(64) for _ in range(8)]


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        ({"dp": 32, "tp": 8, "pp": 2}, {"pp": 2, "dp": 32, "tp": 8}),
        ({"tp": 8}, {"dp": 64, "tp": 8}),
        ({"tp": 8, "pp": -1, "dp": 4}, {"pp": 16, "dp": 4, "tp": 8}),
        ({"tp": 2, "pp": -1}, {"pp": 256, "tp": 2}),
        ({}, {"dp": 512}),
        ({"dp_shard": 8, "dp_replicate": 64}, {"dp_replicate": 64, "dp_shard": 8}),
        ({"cp": 2, "tp": 4, "ep": 2}, {"dp": 32, "ep": 2, "cp": 2, "tp": 4}),
    ],
)
def test_sizes(requested, expected):
    sizes = resolve(requested, HOSTS)
    assert list(sizes.items()) == list(expected.items())


@pytest.mark.parametrize(
    ("requested", "values"),
    [
        ({"dp": 3}, ("dp = 3 is not 512 ranks (64 hosts × 8)",)),
        ({"tp": 3}, ("tp = 3 does not divide 512 ranks",)),
        ({"tp": 16}, ("tp=16 does not fit into h0, which has 8 ranks", "inside hosts")),
        ({"tp": -1, "pp": -1}, ("only one dimension may be -1, not tp and pp",)),
    ],
)
def test_sizes_that_do_not_fit(requested, values):
    text = refusal(lambda: resolve(requested, HOSTS))
    assert all(value in text for value in values), text


@pytest.mark.parametrize("letters", ["ababaa", "abba"])
def test_ranks_that_are_not_numbered_host_by_host(letters):
    values = ("tp=2 ", "ranks 0, 1,", "a and b", "mpiddp launch", "mpirun --map-by slot")
    text = refusal(lambda: resolve({"tp": 2}, letters))
    assert re.fullmatch(error("which are", *values), text)
    assert resolve({"tp": 2}, letters, tp_across_hosts=True) == {"dp": len(letters) // 2, "tp": 2}
    assert resolve({"tp": 2}, sorted(letters)) == {"dp": len(letters) // 2, "tp": 2}


def test_bad_sizes_of_a_script():
    for size in (0, -2, 1.5, "2", None):
        text = refusal(lambda size=size: check_sizes({"tp": size}))  # type: ignore[misc]
        assert text.startswith(f"tp={size!r}: expected a whole number, 1 or more, or -1")
    assert 'Did you mean "dp_shard"?' in refusal(lambda: check_sizes({"dp_shards": 2}))
