"""Workarounds for Python and torch. Each test fails once its workaround is no longer needed.

Of mpiddp/runtime/patches.py, tests/promises/test_as_under_torchrun.py has `finalized_mpi`: it needs an MPI.
"""

import shutil
import signal
import subprocess
import sys

import pytest

from mpiddp.runtime import patches
from tests.support.ranks import run_command


def run(code: str) -> str:
    """The output of a new Python process."""
    done = run_command([sys.executable, "-c", code])
    assert done.stderr == ""
    return done.stdout.strip()


def test_hashlib_still_loads_openssl():
    """mpiddp/protocol/channel.py, `_mac`"""
    is_loaded = "import sys; print('_hashlib' in sys.modules)"
    assert run(f"import hashlib; {is_loaded}") == "True"
    assert run(f"import mpiddp.launch.main, mpiddp.protocol; {is_loaded}") == "False"


def test_python_still_forgets_the_exit_code_of_a_script():
    """mpiddp/runtime/join.py"""
    state = (
        "[n for n in ('last_exc', 'last_value', 'last_type') if hasattr(sys, n)], sys.exc_info()"
    )
    code = f"import atexit, sys; atexit.register(lambda: print({state})); sys.exit(3)"
    assert run(code) == "[] (None, None, None)"
    hooks = "sys.excepthook = sys.unraisablehook = lambda *args: print(args)"
    assert run(f"import sys; {hooks}; sys.exit(3)") == ""


THREADS = """
import atexit, pathlib, torch, torch.distributed as dist
names = lambda: [each.read_text().strip() for each in pathlib.Path("/proc/self/task").glob("*/comm")]
atexit.register(lambda: print("pt_gloo_runloop" in names()))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
"""
STEPS = """
import torch
parameter = torch.nn.Parameter(torch.zeros(1))
parameter.grad = torch.zeros(1)
optimizer = torch.optim.SGD([parameter])
optimizer.step()
print([name for name in optimizer.state[parameter] if "step" in name])
"""
RECORDS = """
import pickle, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(2500):
    dist.all_reduce(torch.ones(1))
print(len(pickle.loads(torch._C._distributed_c10d._dump_fr_trace(True, False, False))["entries"]))
"""
OF_PYTHON = {
    patches.lines: ("import sys; print(sys.stdout.line_buffering)", "False"),
    patches.stack: ("import os, signal; os.kill(os.getpid(), signal.SIGURG)", ""),
    patches.torch_ahead: ("import gc, torch; print(len(gc.get_objects()) > 100_000)", "True"),
    patches.spare: ("import sys, torch; print(len(sys.modules) > 500)", "True"),
    patches.gloo_end: (THREADS, "True"),
    patches.optimizer_steps: (STEPS, "[]"),
    patches.flight_recorder: (RECORDS, "2000"),
}


@pytest.mark.parametrize("patch", OF_PYTHON, ids=lambda patch: patch.__name__)
def test_without_a_patch(patch):
    """Python and torch alone do not do what the patch does."""
    code, expected = OF_PYTHON[patch]
    assert run(code) == expected


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGUSR1])
def test_python_still_dies_silently(number):
    """`crash_stack` and `stop_signal`"""
    done = run_command([sys.executable, "-c", f"import os; os.kill(os.getpid(), {int(number)})"])
    assert (done.returncode, done.stderr) == (-number, "")


LOOKS_UP = """
import contextlib, sys
from torch.distributed import TCPStore
from mpiddp.runtime.patches import no_dns
with no_dns() if sys.argv[1:] else contextlib.nullcontext():
    TCPStore("127.0.0.1", 0, 1, True)
"""


def test_torch_still_looks_up_names(tmp_path):
    """`no_dns`: where no DNS answers, torch says that it has found no name."""
    script = tmp_path / "script.py"
    script.write_text(LOOKS_UP)
    with_loopback = ["sh", "-c", 'ip link set lo up && exec "$@"', "-"]
    alone = ["unshare", "--map-root-user", "--net", *with_loopback]
    if not shutil.which("ip") or subprocess.run([*alone, "true"], check=False).returncode:
        pytest.skip("no network namespace of its own can be made here")

    def complains(*arguments: str) -> bool:
        done = run_command([*alone, sys.executable, str(script), *arguments])
        assert done.returncode == 0, done.stderr
        return "hostname of the client socket cannot be retrieved" in done.stderr

    assert complains()
    assert not complains("without names")


def test_every_patch_has_its_test():
    """Each patch is in the list above, or named by one of the other tests."""
    every = {*patches.BEFORE_RANKS_MEET, *patches.ONCE_THEY_HAVE_MET, *patches.IN_A_CALL}
    others = {patches.crash_stack, patches.stop_signal, patches.no_dns, patches.finalized_mpi}
    assert every == OF_PYTHON.keys() | others
    assert len(every) <= 12
