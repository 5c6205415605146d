"""Not a zygote: responds to the first message with the bytes in WRONG_RESPONSE."""

from __future__ import annotations

import os
import signal
import socket
import sys

if __name__ == "__main__":
    kernel = socket.socket(fileno=int(sys.argv[1]))
    kernel.recv(1 << 16)
    kernel.send(bytes.fromhex(os.environ["WRONG_RESPONSE"]))
    signal.pause()
