"""What a push believes of a host. tests/promises/test_hosts.py has the pushes."""

import resource
import zlib
from base64 import b64encode

from mpiddp.hosts import push


def test_a_list_that_a_host_has_written_does_not_fill_the_memory():
    """95 kB may unpack to gigabytes. Then the host counts as one to which nothing has been sent."""
    assert push.listed_paths(b64encode(zlib.compress(b"a\0b/c")).decode()) == {"a", "b/c"}
    assert push.listed_paths("no list") == set()
    packer = zlib.compressobj(9)
    zeros = bytes(1 << 20)
    bomb = b"".join(packer.compress(zeros) for _ in range(600)) + packer.flush()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert push.listed_paths(b64encode(bomb).decode()) == set()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600_000  # kB
