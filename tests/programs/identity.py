"""Print who this rank is, its arguments and its folder: one line of JSON for each rank."""

import json
import os
import pwd
import socket
import sys

NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


def tell(**more: object) -> None:
    who = {name: int(os.environ[name]) for name in NUMBERS}
    where = {"host": socket.gethostname(), "user": pwd.getpwuid(os.getuid()).pw_name}
    line = json.dumps({**who, **where, "argv": sys.argv[1:], "cwd": os.getcwd(), **more})
    # A line and its newline in one piece: Intel's mpirun would mix the pieces of two ranks.
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    tell()
