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


# One process for all: most of its time is the import of torch.
ALONE = """
import atexit, gc, os, pathlib, pickle, signal, sys
print("lines", sys.stdout.line_buffering)
print("stack", os.kill(os.getpid(), signal.SIGURG))

import torch, torch.distributed as dist
print("frozen_torch", len(gc.get_objects()) > 100_000)

parameter = torch.nn.Parameter(torch.zeros(1))
parameter.grad = torch.zeros(1)
optimizer = torch.optim.SGD([parameter])
optimizer.step()
print("optimizer_steps", [name for name in optimizer.state[parameter] if "step" in name])

names = lambda: [each.read_text().strip() for each in pathlib.Path("/proc/self/task").glob("*/comm")]
atexit.register(lambda: print("gloo_end", "pt_gloo_runloop" in names()))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(2500):
    dist.all_reduce(torch.ones(1))
kept = pickle.loads(torch._C._distributed_c10d._dump_fr_trace(True, False, False))["entries"]
print("flight_recorder", len(kept))
"""
OF_PYTHON = {
    patches.lines: "False",
    patches.stack: "None",
    patches.frozen_torch: "True",
    patches.gloo_end: "True",
    patches.optimizer_steps: "[]",
    patches.flight_recorder: "2000",
}


def test_without_patches():
    """Python and torch alone do not do what the patches do."""
    found = dict(line.split(" ", 1) for line in run(ALONE).splitlines())
    assert found == {patch.__name__: said for patch, said in OF_PYTHON.items()}


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGUSR1])
def test_python_still_dies_silently(number):
    """`crash_stack` and `stop_signal`"""
    done = run_command([sys.executable, "-c", f"import os; os.kill(os.getpid(), {int(number)})"])
    assert (done.returncode, done.stderr) == (-number, "")


LOOKS_UP = """
import sys
from torch.distributed import TCPStore
from mpiddp.runtime.patches import no_dns
if "with the patch" in sys.argv:
    no_dns(None)
TCPStore("127.0.0.1", 0, 1, True)
"""


def test_torch_still_looks_up_names():
    """`no_dns`: where no DNS answers, torch says that it has found no name."""
    with_loopback = ["sh", "-c", 'ip link set lo up && exec "$@"', "-"]
    alone = ["unshare", "--map-root-user", "--net", *with_loopback]
    if not shutil.which("ip") or subprocess.run([*alone, "true"], check=False).returncode:
        pytest.skip("no network namespace of its own can be made here")
    for with_patch in (["with the patch"], []):
        done = run_command([*alone, sys.executable, "-c", LOOKS_UP, *with_patch])
        assert done.returncode == 0, done.stderr
        complains = "hostname of the client socket cannot be retrieved" in done.stderr
        assert complains is not bool(with_patch), done.stderr


def test_every_patch_has_its_test():
    """Each patch is in the list above, or named by one of the other tests."""
    every = {
        *patches.BEFORE_RANKS_MEET,
        *patches.ONCE_THEY_HAVE_MET,
        *patches.ONCE_TORCH_IS_THERE,
        *patches.IN_A_CALL,
    }
    others = {patches.crash_stack, patches.stop_signal, patches.no_dns, patches.finalized_mpi}
    others.add(patches.store_of_job)  # tests/promises/test_failures.py, test_later_groups
    # tests/promises/test_hangs.py, tests/data/records/left_the_loop.jsonl
    others.add(patches.waits)
    # tests/promises/test_stop.py, test_a_file_that_is_being_written: torch.save alone leaves a torn file
    others.add(patches.whole_files)
    assert every == OF_PYTHON.keys() | others
    assert len(every) <= 14
