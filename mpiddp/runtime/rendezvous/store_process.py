"""torch's stores of a job, in a process of rank 0's agent that has nothing of the script's.

    python -S -s -c "…; main()" *FOLDERS     (stdin: a socket with the agent's orders)

`mpiddp.runtime.store_server` starts it. An order is the place of the store of an attempt, with its listener. One without a listener ends the store. The process loads
torch's C++ module alone, which takes a fifth of the time and the memory of `import torch`: the Python modules that
the C++ module asks for are empty here. If a torch does not work so, all of it is imported.
"""

from __future__ import annotations

import ctypes
import json
import signal
import socket
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from mpiddp.protocol.channel import STOP_SIGNALS, STORE_NAME, name_process


def main() -> None:
    """Serve the store of each attempt, as the agent orders, and end with the agent."""
    for number in STOP_SIGNALS:  # they are for the script
        signal.signal(number, signal.SIG_IGN)
    name_process(STORE_NAME)
    with suppress(AttributeError):  # no glibc: torch looks up a name of each client, only to log it
        ctypes.CDLL(None).__nss_configure_lookup(b"hosts", b"none")
    make, orders, stores = _tcp_store(), socket.socket(fileno=0), list[object]()
    options = {"is_master": True, "wait_for_workers": False, "multi_tenant": True}
    while (order := socket.recv_fds(orders, 1 << 12, 1))[0]:
        place = json.loads(order[0])
        stores[:] = [make(**place, **options, master_listen_fd=file) for file in order[1]]


def _tcp_store() -> Any:
    """The class TCPStore of the torch that the folders lead to."""
    spec = find_spec("torch")
    folder = Path(str(spec.origin)).parent if spec else Path()
    try:
        for name in ("torch", "torch.distributed"):
            sys.modules[name] = ModuleType(name)
        torch: Any = sys.modules["torch"]
        torch.__path__, torch.distributed = [str(folder)], sys.modules["torch.distributed"]
        library = folder / "lib/libtorch_global_deps.so"  # as torch/__init__.py loads it
        if library.exists():
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        from torch import _C

        _C._c10d_init()
        return _C._distributed_c10d.TCPStore
    except Exception:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
            del sys.modules[name]
        from torch.distributed import TCPStore

        return TCPStore
