"""Several ranks that are missing are all named.

Tests mpiddp/runtime/join.py.
python -m pytest tests/unit/runtime/test_missing_ranks.py
"""

from __future__ import annotations

from mpiddp.launch.ranks import Ranks
from mpiddp.launch.watch import missing_sentence
from mpiddp.protocol.server import Message


def test_several_missing_ranks_are_all_named() -> None:
    """Frames of importlib and stacks of other threads are left out."""
    state = Ranks(["a", "a", "b", "b"])
    text = (
        "thread reader:\n"
        '  File "/x/reader.py", line 7, in read\n    wait()\n'
        "\nthread MainThread:\n"
        '  File "/x/train.py", line 3, in main\n    import torch\n'
        '  File "<frozen importlib._bootstrap>", line 1360, in _find_and_load\n'
    )
    state.note(Message(1, "joining", {"timeout_s": 60.0}, 1.0))
    state.note(Message(0, "started", {"host": "a", "pid": 5}, 1.0))
    state.note(Message(0, "stacks", {"text": text, "step": 0}, 1.0))
    assert missing_sentence(state, 60.0) == (
        "only 1 of 4 ranks joined in 60 s. Missing: rank 0 on a, rank 2 on b, rank 3 on b. "
        "The last words of rank 0: in /x/train.py, line 3, in main: import torch"
    )
