"""A batch: the requests that one instance executes together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.serving.request import Request
    from shm.tensor import Tensor


class Batch(msgspec.Struct, eq=False):
    """Requests bound for one instance, which gives every request exactly one final response.

    An entry without a request is padding: the model gets its control tensors and no response is expected. Sequence
    batching has it where a slot has nothing to do.
    """

    entries: list[Request | None]
    #: Whether a request was removed; in a batch of sequences entries may be without a request in any case.
    padded: bool = False
    #: The slot of each entry, by which the worker keeps implicit state; None in a batch without sequences.
    slots: list[int] | None = None
    #: Control tensors of each entry, which the model gets beside the inputs; only in a batch of sequences.
    controls: list[list[Tensor]] | None = None
    #: Unique among the batches of the instance. Set by `InstanceSet.dispatch`.
    number: int = 0
    #: The number by which the instance's worker knows the first entry; the others follow. Set by the instance.
    first_request_number: int = 0

    @property
    def requests(self) -> list[Request]:
        """The requests, without padding."""
        if self.slots is None and not self.padded:  # usual
            return self.entries  # type: ignore[return-value]
        return [request for request in self.entries if request is not None]

    def remove(self, request: Request) -> None:
        """Take a request out that will not be executed; its entry becomes padding."""
        self.entries[self.entries.index(request)] = None
        self.padded = True

    def request_numbers(self) -> Sequence[int]:
        """Return the numbers by which the worker knows the requests, without padding."""
        numbers = range(self.first_request_number, self.first_request_number + len(self.entries))
        if self.slots is None and not self.padded:
            return numbers
        return [number for number, request in zip(numbers, self.entries, strict=True) if request is not None]
