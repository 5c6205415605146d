"""Heads that were seen before: what they say, and which model is to execute the request behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.errors import ServingError
from protocols.http.endpoints.infer import ENTRY_POINT
from protocols.http.fast.request_head import Head, InferHead, parse_head

if TYPE_CHECKING:
    from kernel.serving.kernel import Kernel
    from kernel.serving.model import Model

#: How many are remembered, and how long they may be.
_HEADS = 256
_MAX_BYTE_SIZE = 1024


class Target(msgspec.Struct, frozen=True):
    """A request that the lane answers."""

    infer: InferHead
    model: Model


class KnownHead(msgspec.Struct, frozen=True):
    """A head, and what became of it while the catalog of models was of `generation`: later it does not hold."""

    text: bytes
    generation: int
    #: What the head says; None where that is not beyond doubt.
    head: Head | None
    #: None where aiohttp is to answer.
    target: Target | None = None
    body_byte_size: int = 0


class Heads:
    """The heads that the lane has seen, on all connections."""

    def __init__(self, kernel: Kernel, max_input_size: int) -> None:
        """`max_input_size` is in bytes, as for `parse_head`."""
        self._kernel = kernel
        self._max_input_size = max_input_size
        self._known: dict[bytes, KnownHead] = {}
        self._generation = -1

    def look_at(self, text: bytes) -> KnownHead:
        """Return what is known of the head `text`, up to and with its empty line."""
        generation = self._kernel.catalog.generation
        if generation != self._generation or len(self._known) >= _HEADS:
            self._known.clear()
            self._generation = generation
        known = self._known.get(text)
        if known is None:
            known = self._find_out(text, generation)
            if len(text) <= _MAX_BYTE_SIZE:
                self._known[text] = known
        return known

    def _find_out(self, text: bytes, generation: int) -> KnownHead:
        head = parse_head(text, self._max_input_size)
        if head is None:
            return KnownHead(text, generation, None)
        return KnownHead(text, generation, head, self._target(head.infer), head.content_length)

    def _target(self, infer: InferHead | None) -> Target | None:
        """Return what the lane is to answer; what is to be refused at once, aiohttp refuses."""
        if infer is None:
            return None
        try:
            return Target(infer, self._kernel.resolve_unary(infer.model, infer.version, ENTRY_POINT))
        except ServingError:
            return None
