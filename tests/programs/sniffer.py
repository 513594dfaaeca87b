"""Write all that this host's network interfaces send and receive to a file, until it is ended. It needs root.

python sniffer.py FILE     # prints "ready" first
"""

import socket
import sys

ETH_P_ALL = 3  # linux/if_ether.h
with (
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL)) as wire,
    open(sys.argv[1], "wb", buffering=0) as file,  # noqa: PTH123
):
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 26)
    print("ready", flush=True)
    while True:
        file.write(wire.recv(1 << 17))
