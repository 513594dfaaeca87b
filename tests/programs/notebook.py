"""Run cells with mpiddp.spawn in a real Jupyter kernel, and print what was right."""

import os
import re
from pathlib import Path

from jupyter_client.manager import KernelManager

PATIENCE_S = 600
FUNCTIONS = """
import os, sys, time
import mpiddp

FACTOR = 10

def work(shift):
    rank = int(os.environ["RANK"])
    print("out", rank)
    print("err", rank, file=sys.stderr)
    return FACTOR * rank + shift

def fails():
    if os.environ["RANK"] == "1":
        raise LookupError("no such thing")
    time.sleep(1000)

def sleeps():
    print("pid", os.getpid())
    time.sleep(1000)
"""


def run(code, interrupt_at=None):
    """Execute a cell, and return what it shows by kind. Interrupt it once a text was shown twice."""
    request = client.execute(code)
    shown = {"stdout": "", "stderr": "", "result": "", "error": ""}
    while True:
        message = client.get_iopub_msg(timeout=PATIENCE_S)
        if message["parent_header"].get("msg_id") != request:
            continue
        content = message["content"]
        match message["msg_type"]:
            case "stream":
                shown[content["name"]] += content["text"]
                if interrupt_at and shown["stdout"].count(interrupt_at) == 2:
                    interrupt_at = None
                    manager.interrupt_kernel()
            case "execute_result":
                shown["result"] = content["data"]["text/plain"]
            case "error":
                shown["error"] = f"{content['ename']}: {content['evalue']}"
            case "status" if content["execution_state"] == "idle":
                return shown


def check(is_right, name, shown):
    print(name if is_right else shown)


# The kernel shows what the launcher shows by default.
changed = ("MPIDDP_LOG_RANKS", "MPIDDP_PREFIX")
manager = KernelManager()
manager.start_kernel(env={k: v for k, v in os.environ.items() if k not in changed})
client = manager.client()
try:
    client.start_channels()
    client.wait_for_ready(timeout=PATIENCE_S)
    run(FUNCTIONS)
    shown = run("mpiddp.spawn(work, 5, hosts='localhost:2', log_ranks='all')")
    check(shown["result"] == "[5, 15]", "results", shown)
    lines = sorted(re.sub(r"rank (\d) \S+\]", r"\1]", shown["stdout"]).splitlines())
    check(lines == ["[0] out 0", "[1] out 1"] and "] err 1\n" in shown["stderr"], "output", shown)
    # Beside the notebook, which has an older version of it than the ranks.
    module = Path("noted.py")
    module.write_text("import threading\nLOCK = threading.Lock()\nVERSION = 1\n", encoding="utf-8")
    spawn = "import noted; f = lambda: noted.VERSION; mpiddp.spawn(f, hosts='localhost:1') + [f()]"
    shown = run(spawn)
    module.write_text(module.read_text(encoding="utf-8").replace("1", "20"), encoding="utf-8")
    again = run(spawn)
    check((shown["result"], again["result"]) == ("[1, 1]", "[20, 1]"), "modules", [shown, again])
    shown = run("mpiddp.spawn(fails, hosts='localhost:2')")
    is_right = "rank 1" in shown["error"] and 'raise LookupError("no such thing")' in shown["error"]
    check(is_right and shown["error"].startswith("RankFailed: "), "exception", shown)
    shown = run("mpiddp.spawn(sleeps, hosts='localhost:2', log_ranks='all')", interrupt_at="pid")
    check(shown["error"].startswith("KeyboardInterrupt"), "interrupt", shown)
finally:
    client.stop_channels()
    manager.shutdown_kernel(now=True)
