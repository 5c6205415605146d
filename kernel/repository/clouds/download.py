"""Receives objects in blocks, several at a time, each straight into its file.

The clients of the stores would hold hundreds of MiB of a large object, and would say nothing until all of it is there.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kernel.repository.clouds.messages import Download

#: How many blocks are received at the same time, of one object or of several.
_AT_ONCE = 8

#: Bytes. The first blocks are short, so that a slow store shows progress before it is given up.
_MIN_BYTE_SIZE, _FIRST_BYTE_SIZE, _MAX_BYTE_SIZE = 64 << 10, 128 << 10, 4 << 20

#: Seconds in which a block should arrive: not many more requests than needed, and progress all the time.
_FAST_S, _SLOW_S = 0.5, 4.0


class StoreError(Exception):
    """A request has failed. The message is for operators, and has no secrets."""


class BlockSize:
    """The length of the next block, as the last ones were fast or slow. Pure."""

    def __init__(self) -> None:
        self.byte_size = _FIRST_BYTE_SIZE

    def arrived(self, byte_size: int, took_s: float) -> None:
        """A block has arrived. Only those of the present length say something about it."""
        if byte_size != self.byte_size:
            return
        if took_s < _FAST_S:
            self.byte_size = min(byte_size * 2, _MAX_BYTE_SIZE)
        elif took_s > _SLOW_S:
            self.byte_size = max(byte_size // 2, _MIN_BYTE_SIZE)


class _File:
    """A file that is being received."""

    def __init__(self, name: str, incoming: str, path: str, byte_size: int) -> None:
        self.name = name
        self._incoming = incoming
        self._path = path
        self._missing = byte_size
        self._lock = threading.Lock()
        with _writing():
            self._fd = os.open(incoming, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        if not byte_size:
            self._finish()

    def write(self, offset: int, content: bytes) -> None:
        """Write a block; with the last one the file is at its place."""
        with _writing():
            rest = memoryview(content)
            while rest:
                rest = rest[os.pwrite(self._fd, rest, offset + len(content) - len(rest)) :]
        with self._lock:
            self._missing -= len(content)
            is_whole = not self._missing
        if is_whole:
            self._finish()

    def _finish(self) -> None:
        with _writing():
            os.close(self._fd)
            os.rename(self._incoming, self._path)


class _Block(msgspec.Struct):
    file: _File
    begin: int
    end: int


def download(request: Download, read: Callable[[str, int, int], bytes], progress: Callable[[int], None]) -> None:
    """Receive the files of a request. `read` returns the bytes of an object from a position to another.

    `progress` gets how many bytes have arrived. Raises `StoreError`, and what `read` raises; then blocks may still
    arrive.
    """
    size, lock = BlockSize(), threading.Lock()
    blocks = _blocks(request, size)
    received, failed = 0, False

    def work() -> None:
        nonlocal received, failed
        try:
            while True:
                with lock:
                    block = None if failed else next(blocks, None)
                if block is None:
                    return
                begun_s = time.monotonic()
                content = read(block.file.name, block.begin, block.end)
                if len(content) != block.end - block.begin:
                    raise StoreError(
                        f"'{block.file.name}' is not as long as in the listing: {len(content)} bytes came from byte "
                        f"{block.begin} on, {block.end - block.begin} were asked for"
                    )
                block.file.write(block.begin, content)
                with lock:
                    size.arrived(len(content), time.monotonic() - begun_s)
                    received += len(content)
                    progress(received)
        except BaseException:
            failed = True
            raise

    pool = ThreadPoolExecutor(_AT_ONCE)
    done, _ = wait([pool.submit(work) for _ in range(_AT_ONCE)], return_when=FIRST_EXCEPTION)
    for each in done:
        each.result()


def _blocks(request: Download, size: BlockSize) -> Iterator[_Block]:
    """Yield the blocks of all files, one file after the other. Empty files have none, and are there."""
    for index, (name, path) in enumerate(request.files.items()):
        byte_size, begin = request.byte_sizes[name], 0
        file = _File(name, os.path.join(request.incoming, str(index)), path, byte_size)
        while begin < byte_size:
            end = min(begin + size.byte_size, byte_size)
            yield _Block(file, begin, end)
            begin = end


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Say that this machine has failed, not the store."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"the copy cannot be written: {error.strerror}") from error
