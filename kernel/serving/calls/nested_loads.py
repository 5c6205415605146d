"""Models that load other models while they are loaded themselves, in `initialize`. Pure.

A load waits for an earlier load of the same model. So a model that loads itself during its load would wait without end,
directly or through other models.
"""

from __future__ import annotations

from kernel.errors import InvalidArgument


class NestedLoads:
    """Which models that are being loaded wait for the loads of which others."""

    def __init__(self) -> None:
        self._waits: list[tuple[str, str]] = []

    def begin(self, model: str, loaded: str) -> None:
        """`model`, which is being loaded, waits until `loaded` is. `end` follows.

        Raises `InvalidArgument` if `loaded` waits for `model`.
        """
        reached, todo = {loaded}, [loaded]
        while todo:
            waiting = todo.pop()
            new = {each for by, each in self._waits if by == waiting} - reached
            reached |= new
            todo += new
        if model in reached:
            raise InvalidArgument(
                f"model '{loaded}' cannot be loaded by model '{model}': its load waits for that of '{model}'"
            )
        self._waits.append((model, loaded))

    def end(self, model: str, loaded: str) -> None:
        """A wait that `begin` has noted is over."""
        self._waits.remove((model, loaded))
