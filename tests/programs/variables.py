"""Print which of the variables that the arguments name this rank has. With "wait", stay until it is ended."""

import json
import os
import socket
import sys
import time

found = {name: os.environ[name] for name in sys.argv[1:] if name in os.environ}
record = {"RANK": int(os.environ["RANK"]), "host": socket.gethostname(), "found": found}
os.write(1, f"{json.dumps(record)}\n".encode())
while "wait" in sys.argv:
    time.sleep(1)
