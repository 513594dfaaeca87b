"""Run cells with mpiddp.spawn in a real Jupyter kernel."""

import os
import re
from pathlib import Path

from jupyter_client.manager import start_new_kernel

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
    shown = {"stdout": "", "stderr": "", "result": "", "error": ""}

    def show(message):
        nonlocal interrupt_at
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

    client.execute_interactive(code, output_hook=show, timeout=PATIENCE_S)
    return shown


# The kernel shows what the launcher shows by default.
changed = ("MPIDDP_LOG_RANKS", "MPIDDP_PREFIX")
env = {k: v for k, v in os.environ.items() if k not in changed}
manager, client = start_new_kernel(PATIENCE_S, env=env)
try:
    run(FUNCTIONS)
    shown = run("mpiddp.spawn(work, 5, hosts='localhost:2', log_ranks='all')")
    assert shown["result"] == "[5, 15]", shown
    lines = sorted(re.sub(r"rank (\d) \S+\]", r"\1]", shown["stdout"]).splitlines())
    assert lines == ["[0] out 0", "[1] out 1"], shown
    assert "] err 1\n" in shown["stderr"], shown
    # Beside the notebook, which has an older version of it than the ranks.
    module = Path("noted.py")
    module.write_text("import threading\nLOCK = threading.Lock()\nVERSION = 1\n", encoding="utf-8")
    spawn = "import noted; f = lambda: noted.VERSION; mpiddp.spawn(f, hosts='localhost:1') + [f()]"
    shown = run(spawn)
    module.write_text(module.read_text(encoding="utf-8").replace("1", "20"), encoding="utf-8")
    again = run(spawn)
    assert (shown["result"], again["result"]) == ("[1, 1]", "[20, 1]"), [shown, again]
    shown = run("mpiddp.spawn(fails, hosts='localhost:2')")
    words = r'(?s)RankFailed: .*rank 1.*raise LookupError\("no such thing"\)'
    assert re.match(words, shown["error"]), shown
    shown = run("mpiddp.spawn(sleeps, hosts='localhost:2', log_ranks='all')", interrupt_at="pid")
    assert shown["error"].startswith("KeyboardInterrupt"), shown
finally:
    client.stop_channels()
    manager.shutdown_kernel(now=True)
