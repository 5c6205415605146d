"""A batch: the requests that one instance executes together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from kernel.serving.request import Request


class Batch(msgspec.Struct, eq=False):
    """Requests bound for one instance. Whoever executes it answers every request exactly once."""

    requests: list[Request]
