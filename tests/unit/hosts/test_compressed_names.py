"""Names of hosts as Slurm writes them: node[1-3].

Tests mpiddp/hosts/allocations.py.
python -m pytest tests/unit/hosts/test_compressed_names.py
"""

from __future__ import annotations

import pytest

from mpiddp.hosts.allocations import compress_names, expand_nodelist


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["login"], "login"),
        (["n5"], "n5"),
        (["n1", "n2", "n4", "n5", "n7"], "n[1-2,4-5,7]"),
        (["n9", "n10", "n11"], "n[9-11]"),
        (["n09", "n10", "n1"], "n[1,09-10]"),
        (["n2", "n1", "n2"], "n[1-2]"),
        (["n2", "gpu1", "n1", "login"], "n[1-2],gpu1,login"),
        (["n1.a.org", "n2.a.org", "n3.b.org"], "n[1-2].a.org,n3.b.org"),
        # Addresses are no names with a number.
        (["10.0.0.1", "11.0.0.1"], "10.0.0.1,11.0.0.1"),
        (["fe80::1", "fe80::2"], "fe80::1,fe80::2"),
    ],
)
def test_names_are_compressed(names: list[str], text: str) -> None:
    assert compress_names(names) == text
    if ":" not in text:
        assert sorted(expand_nodelist(text)) == sorted(set(names))
