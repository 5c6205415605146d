"""When polling tries again to load a model that has failed. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from kernel.repository.layout import ModelFolder

#: The longest pause between two attempts, in nanoseconds.
MAX_PAUSE_NS = 300_000_000_000


class _Failed(msgspec.Struct):
    #: The files that could not be loaded.
    folder: ModelFolder
    pause_ns: int
    next_ns: int


class FailedLoads:
    """The models of the repositories whose last load has failed.

    Changed files are tried at once. The same files are tried again after growing pauses: the cause may lie elsewhere,
    as memory or a package that was not there, and each attempt costs the time of a load.
    """

    def __init__(self, poll_ns: int) -> None:
        """`poll_ns` is the time between two polls, and the first pause."""
        self._poll_ns = poll_ns
        #: By the models' identifiers.
        self._failed: dict[str, _Failed] = {}

    def has(self, identifier: str) -> bool:
        """Whether the last load of a model has failed."""
        return identifier in self._failed

    def is_due(self, folder: ModelFolder, now_ns: int) -> bool:
        """Whether a poll loads `folder`: a model that has not failed, that has changed, or whose pause is over."""
        failed = self._failed.get(folder.identifier)
        return failed is None or failed.folder != folder or now_ns >= failed.next_ns

    def ended(self, folder: ModelFolder, now_ns: int, *, failed: bool) -> None:
        """A load of `folder` has ended."""
        if not failed:
            self._failed.pop(folder.identifier, None)
            return
        former = self._failed.get(folder.identifier)
        again = former is not None and former.folder == folder
        pause_ns = min(former.pause_ns * 2, MAX_PAUSE_NS) if again and former is not None else self._poll_ns
        # Polls come a little late, and never early.
        self._failed[folder.identifier] = _Failed(folder, pause_ns, now_ns + pause_ns - self._poll_ns // 2)
