"""Print who this rank is, its arguments and its folder: one line of JSON for each rank."""

import json
import os
import socket
import sys

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
who = {name: int(os.environ[name]) for name in NAMES}
line = json.dumps({**who, "host": socket.gethostname(), "argv": sys.argv[1:], "cwd": os.getcwd()})
# A line and its newline in one piece: Intel's mpirun would mix the pieces of two ranks.
os.write(1, f"{line}\n".encode())
