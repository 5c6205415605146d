"""Messages that are received and are not requests yet take no more than the budget."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from bench.server import ServerProcess
from protocols.grpc.h2 import frames
from tests.end_to_end.floods.flooder import GREETING, begin

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = """
backend: "identity"
input [{ name: "IN" data_type: TYPE_UINT8 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_UINT8 dims: [-1] }]
"""

BUDGET = 16 << 20

#: Of 60 KiB each, of which the last byte does not come.
CALLS = 900
CONTENT_BYTE_SIZE = 60 << 10


def resident_byte_size(pid: int) -> int:
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def flood(port: int) -> socket.socket:
    """Open a connection with incomplete calls, wait until the server has read them, and return it."""
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(GREETING)
    start = bytes(1) + CONTENT_BYTE_SIZE.to_bytes(4, "big") + bytes(CONTENT_BYTE_SIZE - 1)
    for number in range(1, 2 * CALLS, 2):
        parts = [begin(number)]
        for position in range(0, len(start), 2**14):
            part = start[position : position + 2**14]
            parts += (frames.frame_header(len(part), frames.DATA, 0, number), part)
        connection.sendall(b"".join(parts))
    connection.sendall(frames.PING_REQUEST)
    received = b""
    acknowledgement = frames.ping_ack(memoryview(frames.PING_REQUEST)[-8:])
    while acknowledgement not in received:
        part = connection.recv(1 << 16)
        assert part, "the server has ended the connection"
        received = received[-32:] + part
    return connection


def test_incomplete_messages_of_many_calls_take_no_more_than_the_budget(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(CONFIG)
    with ServerProcess(tmp_path, f"--memory-byte-size={BUDGET}") as server:
        before = resident_byte_size(server.pid)
        connections = [flood(server.grpc_port) for _ in range(3)]  # 158 MiB
        assert resident_byte_size(server.pid) - before < 3 * BUDGET
        for connection in connections:
            connection.close()
