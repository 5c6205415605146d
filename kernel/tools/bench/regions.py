"""Regions of shared memory of `naiad bench`: inputs, written once, and places for outputs.

A region has no name any more when it is registered: a server has opened it by then, and nothing stays in `/dev/shm`,
however this program ends.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kernel.tools.bench.requests import BenchInput, BenchOutput, RegionSpan
from kernel.tools.client import ClientError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kernel.tools.bench.target import BenchTarget

_FOLDER = Path("/dev/shm")
_ALIGNMENT = 64
_numbers = itertools.count()


class BenchRegions:
    """The regions at one server. `close` unregisters them."""

    def __init__(self, target: BenchTarget) -> None:
        self._target = target
        self._registered: list[str] = []

    def close(self) -> None:
        """Unregister all regions. A server that has gone has none any more."""
        while self._registered:
            name = self._registered.pop()
            try:
                self._target.unregister(name)
            except ClientError:
                continue

    def place_inputs(self, values: Sequence[Sequence[BenchInput]]) -> list[list[BenchInput]]:
        """Return the inputs with their places in a new region. Raises `ClientError`."""
        name, parts, position = _new_name(), [], 0
        placed: list[list[BenchInput]] = []
        for inputs in values:
            placed.append([])
            for tensor in inputs:
                span = RegionSpan(name, position, len(tensor.raw))
                placed[-1].append(msgspec.structs.replace(tensor, span=span))
                size = _aligned(len(tensor.raw))
                parts.append(tensor.raw.ljust(size, b"\0"))
                position += size
        self._register(name, b"".join(parts), position)
        return placed

    def place_outputs(self, byte_sizes: Mapping[str, int], connections: int) -> list[list[BenchOutput]]:
        """Return the places of the outputs of each connection in a new region. Raises `ClientError`."""
        name = _new_name()
        each = sum(_aligned(size) for size in byte_sizes.values())
        self._register(name, b"", each * connections)
        found = []
        for connection in range(connections):
            position = connection * each
            outputs = []
            for output, size in byte_sizes.items():
                outputs.append(BenchOutput(output, RegionSpan(name, position, size)))
                position += _aligned(size)
            found.append(outputs)
        return found

    def _register(self, name: str, content: bytes, byte_size: int) -> None:
        path = _FOLDER / name
        try:
            with path.open("xb") as file:
                file.write(content)
                # Memory that is not there would be a signal in the server, when it writes.
                os.posix_fallocate(file.fileno(), 0, max(byte_size, 1))
            self._registered.append(name)  # before, so that an interrupt leaves nothing
            self._target.register(name, f"/{name}", max(byte_size, 1))
        except OSError as error:
            raise ClientError(f"no shared memory of {byte_size} bytes in {_FOLDER}: {error.strerror}") from None
        except ClientError as error:
            raise ClientError(f"--shared-memory: {error}") from None
        finally:
            path.unlink(missing_ok=True)


def _new_name() -> str:
    return f"naiad_bench_{os.getpid()}_{next(_numbers)}"


def _aligned(byte_size: int) -> int:
    return -(-max(byte_size, 1) // _ALIGNMENT) * _ALIGNMENT
