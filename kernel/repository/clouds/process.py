"""The process that reads clouds for the kernel: `python -m kernel.repository.clouds.process`.

It reads requests from standard input and writes responses to standard output, see `messages.py`. It ends with its
input, which ends with the kernel, and after a minute without a request: the clients of the stores need 50 to 80 MiB.
"""

from __future__ import annotations

import logging
import os
import select
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.repository.clouds.download import StoreError
from kernel.repository.clouds.messages import IDLE_S, MAX_ITEM_COUNT, Failed, Part, Received, Request, Result
from kernel.repository.clouds.stores import Stores

if TYPE_CHECKING:
    from typing import BinaryIO

    from kernel.repository.clouds.messages import Response

#: Seconds between two messages about progress.
_PROGRESS_S = 0.5

_LENGTH = struct.Struct("!I")


class _Responses:
    """Writes messages; progress comes from several threads."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._next_progress_s = 0.0

    def send(self, message: Response) -> None:
        content = msgspec.msgpack.encode(message)
        if not isinstance(message, Received):
            self._next_progress_s = 0.0  # of the next request
        with self._lock:
            self._stream.write(_LENGTH.pack(len(content)) + content)
            self._stream.flush()

    def progress(self, count: int) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_progress_s:
            self._next_progress_s = now_s + _PROGRESS_S
            self.send(Received(count))


def serve(source: BinaryIO, target: BinaryIO) -> None:
    """Answer requests until the input ends, or for `IDLE_S` seconds none comes."""
    stores, output = Stores(), _Responses(target)
    decoder = msgspec.msgpack.Decoder(Request)
    while select.select([source], [], [], IDLE_S)[0]:
        head = _read(source, _LENGTH.size)
        if len(head) < _LENGTH.size:
            return
        request = decoder.decode(_read(source, _LENGTH.unpack(head)[0]))
        try:
            value = stores.answer(request, output.progress)
            while isinstance(value, list) and len(value) > MAX_ITEM_COUNT:
                output.send(Part(_encoded(value[:MAX_ITEM_COUNT])))
                value = value[MAX_ITEM_COUNT:]
            output.send(Result(_encoded(value)))
        except StoreError as error:
            output.send(Failed(str(error)))


def _encoded(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(value))


def _read(source: BinaryIO, byte_size: int) -> bytes:
    """Return `byte_size` bytes; fewer at the end of the input."""
    parts, missing = [], byte_size
    while missing and (part := source.read(missing)):
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def _end_with_input(fd: int) -> None:
    """End this process when the kernel has ended, also in the middle of a request. Blocks until then."""
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


def main() -> None:
    """Serve the kernel. What libraries print goes to standard error. What they log may have secrets, and is lost."""
    logging.disable()
    threading.Thread(target=_end_with_input, args=(0,), daemon=True).start()
    target = os.dup(1)
    os.dup2(2, 1)
    # Without a buffer: `select` would not see what is in one.
    with open(0, "rb", buffering=0) as source, open(target, "wb") as stream:
        serve(source, stream)


if __name__ == "__main__":
    main()
