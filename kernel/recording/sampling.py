"""Which requests are recorded: every n-th request, and every n-th sequence with all its requests. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The most sequences that are recorded at a time. One that never ends is forgotten after that number of others.
MAX_SEQUENCES = 1 << 16


class RecordSampler:
    """Counts requests that could be recorded: those of the server, and those of each model with a rate of its own."""

    def __init__(self, rate: int, model_rates: Mapping[str, int]) -> None:
        """`rate` is 1 for each request, 0 for none."""
        self._rates = {"": rate, **model_rates}
        self._counts = dict.fromkeys(self._rates, 0)
        #: Model and id of the recorded sequences that have not ended, the oldest first.
        self._sequences: dict[tuple[str, int | str], None] = {}

    def is_recorded(self, model: str) -> bool:
        """Count a request without a sequence, or a sequence that begins; the first one is recorded."""
        name = model if model in self._rates else ""
        rate = self._rates[name]
        if rate <= 1:
            return rate == 1
        count = self._counts[name]
        self._counts[name] = (count + 1) % rate
        return not count

    def is_recorded_of_sequence(self, model: str, id: int | str, *, start: bool, end: bool) -> bool:
        """Return whether a request of a sequence is recorded: all of them are, or none.

        A sequence that had begun before the recorder is not recorded.
        """
        key = (model, id)
        if start:
            self._sequences.pop(key, None)
            if not self.is_recorded(model):
                return False
            if not end:
                self._sequences[key] = None
                if len(self._sequences) > MAX_SEQUENCES:
                    del self._sequences[next(iter(self._sequences))]
            return True
        if key not in self._sequences:
            return False
        if end:
            del self._sequences[key]
        return True
