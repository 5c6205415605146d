"""A task that records how it ended."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from shm.tensor import Tensor

if TYPE_CHECKING:
    from kernel.errors import ServingError
    from shm.arena import Arena, Block
    from shm.tensor import Span


class RecordedTask:
    """A `kernel.serving.helper_tasks.HelperTask`. `ended` is set at its end."""

    def __init__(self, name: str, source: bytes, arena: Arena | None = None, error: ServingError | None = None) -> None:
        """`arena` has memory for the result; `error` is raised in place of giving it."""
        self.name = name
        self.peer = ""
        self.arguments = b"arguments"
        self.sources = [Tensor("", "UINT8", [len(source)], source)]
        self.messages: list[bytes] = []
        self.result: bytes | None = None
        self.output: Tensor | None = None
        self.error: ServingError | None = None
        self.block: Block | None = None
        self.ended = asyncio.Event()
        self._arena = arena
        self._refusal = error

    def needs_memory(self, message: bytes) -> Span:
        self.messages.append(message)
        if self._refusal is not None:
            raise self._refusal
        assert self._arena is not None
        self.block = self._arena.take(int(message))
        assert self.block is not None
        return self.block.span

    def done(self, result: bytes, output: Tensor | None) -> None:
        assert not self.ended.is_set(), "a task ends once"
        self.result, self.output = result, output
        self.ended.set()

    def failed(self, error: ServingError) -> None:
        assert not self.ended.is_set(), "a task ends once"
        self.error = error
        self.ended.set()
