"""Print who this rank is, its arguments, folder and network: one line of JSON for each rank."""

import json
import os
import pwd
import socket
import sys
from pathlib import Path

NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


def user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # as in a container
        return str(os.getuid())


def tell(**more: object) -> None:
    who = {name: int(os.environ[name]) for name in NUMBERS}
    where = {"host": socket.gethostname(), "user": user(), "cwd": str(Path.cwd())}
    network = {
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        "master": os.environ["MASTER_ADDR"],
    }
    line = json.dumps({**who, **where, **network, "argv": sys.argv[1:], **more})
    # A line and its newline in one piece: Intel's mpirun would mix the pieces of two ranks.
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    tell()
