"""A sequence: requests that belong together and go to one instance."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from kernel.serving.batch import Batch
    from kernel.serving.instance import Instance
    from kernel.serving.request import Request


class Sequence(msgspec.Struct, eq=False):
    """A sequence. `LiveSequences` sets `id`, `ends` and `over`, the scheduler the others."""

    id: int | str
    #: Its requests that are not dispatched, in order. It is short, and a deque takes ten times the memory of a list.
    queue: list[Request]
    #: The instance that has the sequence; None while it waits for a slot.
    instance: Instance | None = None
    slot: int = -1
    #: The batch that has a request of the sequence and is not finished.
    batch: Batch | None = None
    #: A request was executed, so the instance may have state of the sequence.
    begun: bool = False
    #: Its END was received, or it is ending: no further request belongs to it.
    ends: bool = False
    over: bool = False
