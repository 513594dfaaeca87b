"""Environment variables with values that nobody should have set: one sentence each, and no traceback.

Tests mpiddp/runtime/ and mpiddp/hosts/sockets.py. test_world.py has the launchers' own variables.
"""

import pytest

from mpiddp.runtime.reports import announce


@pytest.mark.parametrize("arguments", [["x" * 100_000] * 6, "--resume last", ["a\0"]])
def test_an_announcement_that_is_no_command(arguments):
    with pytest.raises(ValueError, match=r"^mpiddp.announce: "):
        announce(resume_args=arguments)
