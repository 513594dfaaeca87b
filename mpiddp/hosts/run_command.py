"""`mpiddp hosts run`: one command on every host at once. Lines appear as they come, equal ones once.

mpiddp hosts run hostfiles/two_nodes -- nvidia-smi -L

The program below AGENT runs on each host. It needs Python 3.8 and the standard library.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TextIO

from mpiddp.arguments import Option, duration
from mpiddp.errors import DONE, FAILED, UserError, print_error
from mpiddp.hosts.complaints import Answer
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.names import compress_names
from mpiddp.hosts.ssh import ask_hosts
from mpiddp.hosts.where import FILE
from mpiddp.text import escaped, keys_by_value

# It begins the agent's last line, on stderr. No command prints it by chance.
_ENDED = f"mpiddp-hosts-run-{os.urandom(8).hex()} ended: "
# It runs COMMAND in FOLDER, or else in the home folder, or else in /. If the connection ends, nobody reads
# its stdout any more, and it ends all processes of COMMAND.
_AGENT = r"""
import os, select, signal, subprocess, sys, time
GRACE_S, PAUSE_S = 2.0, 0.02
for folder in (FOLDER, os.path.expanduser("~"), "/"):
    try:
        os.chdir(folder)
        break
    except OSError:
        pass
signal.signal(signal.SIGINT, signal.SIG_IGN)  # on the host of the terminal, a Ctrl-C reaches this process
try:
    running = subprocess.Popen(
        COMMAND,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
except OSError as error:
    print("%s: %s%s" % (COMMAND[0], error.strerror, HINT), file=sys.stderr)
    print(ENDED + "127", file=sys.stderr, flush=True)
    sys.exit(127)
poll = select.poll()
poll.register(1, 0)  # errors and hang-ups are always reported
while running.poll() is None:
    if not poll.poll(1000 * PAUSE_S):
        continue
    number, deadline = signal.SIGTERM, time.monotonic() + GRACE_S
    try:
        while True:
            os.killpg(running.pid, number)
            time.sleep(PAUSE_S)
            running.poll()  # until this, a process that has ended belongs to the group
            number = 0 if time.monotonic() < deadline else signal.SIGKILL  # 0 asks whether one is left
    except OSError:  # all have ended
        sys.exit(1)
code = running.returncode if running.returncode >= 0 else 128 - running.returncode
print(ENDED + str(code), file=sys.stderr, flush=True)
sys.exit(code)
"""

OPTIONS = [
    FILE,
    Option("--timeout", value="30s", parse=duration, help="end the command after this time"),
]


def main(options: argparse.Namespace, hosts: Hosts) -> int:
    """Run `options.command` on all hosts, and print the answers. Returns 1 if it failed on any."""
    if not options.command:
        raise UserError(
            "mpiddp hosts run: no command.", fix="mpiddp hosts run FILE -- nvidia-smi -L"
        )
    # The command travels as a literal of Python, so no shell reads it.
    values = {"FOLDER": str(Path.cwd()), "COMMAND": options.command, "ENDED": _ENDED, "HINT": ""}
    if len(options.command) == 1 and re.search(r"[\s|&;<>$]", options.command[0]):
        values["HINT"] = f". For what a shell reads: sh -c {shlex.quote(options.command[0])}"
    program = "".join(f"{name} = {value!a}\n" for name, value in values.items()) + _AGENT
    failures, done = dict[str, str](), set[Host]()

    def show(news: Mapping[Host, Answer], ended: Collection[Host]) -> None:
        done.update(host for host, answer in news.items() if _ENDED in answer.stderr)
        # Before its login, ssh says why it fails, and so does the sentence below.
        begun = [answer for answer in news.values() if answer.has_begun]
        errors = {answer.host.name: answer.stderr.partition(_ENDED)[0] for answer in begun}
        failed = {host.name: _failure(news[host], is_done=host in done) for host in ended}
        _show({host.name: answer.stdout for host, answer in news.items()}, sys.stdout)
        _show(errors, sys.stderr)
        for text, names in keys_by_value(failed).items():
            if text:
                print_error(f"{compress_names(names)}: {text}")
        failures.update(failed)

    work_s = options.timeout or math.inf
    ask_hosts(hosts.hosts, program, work_s=work_s, transport=hosts.transport, show=show)
    return FAILED if any(failures.values()) else DONE


def _show(texts: Mapping[str, str], stream: TextIO) -> None:
    """Print the texts of hosts. Equal texts are printed once, for all their hosts."""
    for text, names in keys_by_value(texts).items():
        where = compress_names(names)
        for line in text.splitlines():
            print(f"{where}: {escaped(line)}", file=stream)
    stream.flush()


def _failure(answer: Answer, *, is_done: bool) -> str:
    """Why the command did not end with exit code 0 on a host, "" if it did."""
    code = answer.exit_code
    if code is None and answer.has_begun:
        return "no end yet; stopped"
    if is_done:
        return f"exit code {code}" if code else ""
    if answer.has_begun and code in (DONE, 255):
        return "the connection was lost"
    return answer.why.removeprefix(f"{answer.host.name}: ")
