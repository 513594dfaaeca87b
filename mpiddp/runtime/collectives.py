"""What a thread reads of its script: its stacks, and the collectives in torch's own record ("flight recorder").

Any thread can read them, while the main thread waits in one, on gloo and on NCCL. Each call has a number in
its process group, which is the same on all ranks of the group: so the launcher can tell who has not come.
Sends and receives between two ranks have none.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import pickle
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from mpiddp.protocol.channel import TEXT_LIMIT
from mpiddp.runtime.stdlib import own

# In a message, which 1,024 ranks may send every ten seconds: calls of all groups together, and groups.
_MOST_CALLS, _MOST_GROUPS = 128, 32
# torch's names, where they are not those of its Python.
_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64", "Int": "int32",
    "Short": "int16", "Char": "int8", "Byte": "uint8",
}  # fmt: skip
_LONG_US = 30_000_000  # a wait for another rank that the launcher hears of
_RELAXED = 2  # CUDA's cudaStreamCaptureModeRelaxed

# The facts of each group, by its name and its backend. They stay when torch's record has lost the calls.
_latest: dict[tuple[str, str], dict[str, Any]] = {}


def calls(peers: Mapping[int, tuple[str, object, int]] | None = None) -> dict[str, Any] | None:
    """The facts of a message "calls"; None in a process that has no process group.

    `peers` are the threads that wait for another rank, see `mpiddp.runtime.patches.waits`.

    torch's record of calls is private. If a version has another form of it, this returns nothing, and the
    launcher only tells that no rank makes a step.
    """
    torch = sys.modules.get("torch.distributed.distributed_c10d")
    with contextlib.suppress(Exception):
        if torch is not None and torch.is_initialized():
            return {**_calls(torch), "peer": _longest(peers or {})}
    return None


def _longest(peers: Mapping[int, tuple[str, object, int]]) -> dict[str, Any] | None:
    """The wait of the thread that has waited longest for another rank, with its stack; None before _LONG_US."""
    waits = [(since_us, thread, name, peer) for thread, (name, peer, since_us) in [*peers.items()]]
    since_us, thread, name, peer = min(waits, default=(0, 0, "", None), key=lambda wait: wait[0])
    if not thread or time.time_ns() // 1000 - since_us < _LONG_US:
        return None
    traceback = own("traceback")
    frame = sys._current_frames().get(thread)
    stack = "".join(traceback.format_stack(frame))[-TEXT_LIMIT:]
    rank = peer if isinstance(peer, int) else None
    return {"call": name, "rank": rank, "since_us": since_us, "stack": stack}


def _calls(torch: Any) -> dict[str, Any]:
    groups = {group.group_name: group for group in list(torch._world.pg_map)}
    entries_of: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for entry in _entries():
        backend, _, entry["op"] = entry["profiling_name"].partition(":")
        name = entry["process_group"][0]
        if name in groups and not entry["is_p2p"]:
            entries = entries_of.setdefault((name, backend), [])
            if entries and entries[-1]["pg_id"] != entry["pg_id"]:
                entries.clear()  # a group that has been destroyed had the same name
            entries.append(entry)
    for facts in _latest.values():
        # A call that torch's record has lost is over, because a rank that waits in a call makes no others.
        facts["calls"] = [(*call[:-1], True) for call in facts["calls"]]
    everyone = [*range(torch.get_world_size())]
    for key, entries in entries_of.items():
        members = sorted(torch._world.pg_group_ranks[groups[key[0]]])
        _latest.pop(key, None)  # the groups that were called last stand last
        _latest[key] = {
            "ranks": None if members == everyone else members,
            **_calls_of(entries, backend=key[1]),
        }
    for key in [key for key in _latest if not _is_of(groups.get(key[0]), key)]:
        del _latest[key]
    latest = [*_latest.items()][-_MOST_GROUPS:]
    most = _MOST_CALLS // max(len(latest), 1)
    messages = [
        {"name": ":".join(key), **facts, "calls": _shortened(facts["calls"], most)}
        for key, facts in latest
    ]
    # The launcher reads the clock of this rank by it: the later, the better.
    return {"groups": messages, "now_us": time.time_ns() // 1000}


def _shortened(calls: list[tuple[int, int, int, bool]], most: int) -> list[Any]:
    """The latest calls, and before them the first that have not ended: in one of these, a rank may wait."""
    waiting = [call for call in calls[:-most] if not call[3]]
    return [*waiting[:most], *calls[-most:]]


def _is_of(group: Any, key: tuple[str, str]) -> bool:
    """Whether the known calls are those of this group, and not of a destroyed one that had its name."""
    if group is None:
        return False
    backends = map(group._get_backend, group._device_types)
    made = [
        backend._get_sequence_number_for_group() for backend in backends if backend.name() == key[1]
    ]
    return not made or max(call[0] for call in _latest[key]["calls"]) <= max(made)


def _calls_of(entries: list[dict[str, Any]], *, backend: str) -> dict[str, Any]:
    """Calls as a message has them: the kinds, and of each call its number, its kind, when it was made, and
    whether it has ended. Several entries of one number are one call."""
    kinds: dict[str, int] = {}
    calls: dict[int, tuple[int, int, int, bool]] = {}
    for entry in entries:
        kind = kinds.setdefault(_kind(entry), len(kinds))
        # For gloo, torch notes only that a call is over.
        has_ended = entry["state"] == "completed" or (backend == "gloo" and entry["retired"])
        number = entry["collective_seq_id"]
        calls[number] = number, kind, entry["time_created_ns"] // 1000, has_ended
    return {"kinds": [*kinds], "calls": [*calls.values()]}


def _kind(entry: dict[str, Any]) -> str:
    """Such as "all_reduce (float32, 1,048,576)": the number of elements that the rank gives."""
    count = sum(map(math.prod, entry["input_sizes"]))
    if not count:
        return str(entry["op"])
    dtype = entry["input_dtypes"][0]
    return f"{entry['op']} ({_DTYPES.get(dtype, dtype.lower())}, {count:,})"


def _entries() -> list[dict[str, Any]]:
    """The latest calls, the first one first. Torch's own pickle takes a third of the time of its JSON."""
    torch: Any = sys.modules["torch"]
    c10d = torch._C._distributed_c10d
    dumps = [getattr(c10d, "_dump_fr_trace", None)]  # an older torch has none for gloo
    if torch.cuda.is_initialized() and _may_ask_events(torch):
        dumps.append(getattr(c10d, "_dump_nccl_trace", None))
    without_stacks = (True, False, False)
    dumped = [pickle.loads(dump(*without_stacks)) for dump in dumps if dump is not None]
    return [entry for record in dumped for entry in record.get("entries", [])]


def _may_ask_events(torch: Any) -> bool:
    """Whether this thread may ask CUDA's events, as the dump of NCCL's calls does.

    While the script captures a CUDA graph, such a question of any thread would end the capture, unless the
    thread is relaxed about it. A thread without a device would open one more on GPU 0.
    """
    # Without a CUDA runtime that torch has made visible, or before the script has used a device, it may not.
    with contextlib.suppress(AttributeError, ValueError):
        exchange = ctypes.CDLL(None).cudaThreadExchangeStreamCaptureMode
        devices = range(torch.cuda.device_count())
        torch.cuda.set_device(min(filter(torch._C._cuda_hasPrimaryContext, devices)))
        return not exchange(ctypes.byref(ctypes.c_int(_RELAXED)))
    return False


def stacks() -> str:
    """The Python stacks of all threads of this process except this one, the main thread's first."""
    traceback = own("traceback")  # takes 5 ms
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts = {
        ident: f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    }
    # Of a long stack, the end is kept, which shows where the thread is.
    first = texts.pop(threading.main_thread().ident or 0, "")[-TEXT_LIMIT:]
    return "\n".join([first, *texts.values()])[:TEXT_LIMIT]
