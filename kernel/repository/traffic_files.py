"""Reads the traffic rules beside the configurations of models, where the models are listed. They load nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kernel.errors import ServingError
from kernel.files.file_threads import in_file_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from kernel.repository.layout import RepositoryContents, TrafficFile


class FileRules(Protocol):
    """What uses the rules. Implemented by `kernel.traffic.control.Traffic`."""

    def set_file(self, name: str, text: bytes | None, error: ServingError | None = None) -> None:
        """Use the content of a model's file; None: it has none. `error` is why it could not be read."""

    def kept_versions(self, name: str) -> set[int]:
        """Return the versions that the rule of a model names."""


class TrafficFiles:
    """The files that were read. Each is read again when it has changed."""

    def __init__(self, read: Callable[[str], bytes]) -> None:
        """`read` returns the content of a file that was listed. It blocks, and raises `ServingError`."""
        self._read = read
        self._known: dict[str, TrafficFile] = {}
        #: Set by the composition root, before the first listing; None where nothing uses the rules.
        self.rules: FileRules | None = None

    def versions(self, name: str, chosen: list[int], found: Collection[int]) -> list[int]:
        """Return the versions to load, ascending: those that the policy has `chosen`, and those that the rule names.

        `found` are the versions that there are.
        """
        kept = set() if self.rules is None else self.rules.kept_versions(name) & set(found)
        return sorted({*chosen, *kept}) if kept else chosen

    async def read(self, found: RepositoryContents, names: Collection[str] | None = None) -> None:
        """Read what is new in a listing, which is of the models `names`, or of all."""
        if self.rules is None:
            return
        for name, file in found.traffic.items():
            if self._known.get(name) == file:
                continue
            try:
                text = await in_file_thread(self._read, file.path)
            except ServingError as error:  # it is tried again with the next listing
                self._known.pop(name, None)
                self.rules.set_file(name, None, error)
            else:
                self._known[name] = file
                self.rules.set_file(name, text)
        for name in [name for name in self._known if name not in found.traffic and (names is None or name in names)]:
            del self._known[name]
            self.rules.set_file(name, None)
