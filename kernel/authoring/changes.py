"""When a model's files have changed and its author has finished saving them. Pure: callers list the files."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kernel.repository.layout import Entry

#: How long files must be unchanged before a reload: editors and `git` write several files one after the other.
QUIET_NS = 300_000_000

#: Names that editors and tools give to files of their own.
_NOT_OF_MODELS = (".pyc", ".pyo", ".swp", ".swx", ".tmp", "~")

#: Path → time of the last change in nanoseconds.
Files = dict[str, int]


def files_of(entries: Iterable[Entry]) -> Files:
    """Return the files of models, without those of editors, caches, and an author's tests."""
    return {path: modified_ns for entry in entries for path, modified_ns in _files(entry, "")}


def _files(entry: Entry, parent: str) -> Iterator[tuple[str, int]]:
    name = entry.name
    if name.startswith((".", "#")) or name.endswith(_NOT_OF_MODELS) or name == "4913":  # vim writes 4913 as a trial
        return
    path = f"{parent}{name}"
    if not entry.is_folder:
        if not (name.startswith("test_") and name.endswith(".py")):
            yield path, entry.modified_ns
        return
    for child in entry.children:
        yield from _files(child, f"{path}/")


class ChangeWatch:
    """Compares listings of files. Times are monotonic nanoseconds."""

    def __init__(self, files: Files) -> None:
        """`files` are those that were loaded."""
        self._loaded = files
        self._seen = files
        self._changed_ns = 0

    def look(self, files: Files, now_ns: int) -> list[str]:
        """Return the paths that differ from what was loaded, if they have been quiet for long enough; else nothing.

        What is returned counts as loaded from now on.
        """
        if files != self._seen:
            self._seen, self._changed_ns = files, now_ns
        if files == self._loaded or now_ns - self._changed_ns < QUIET_NS:
            return []
        loaded, self._loaded = self._loaded, files
        return sorted(path for path in loaded.keys() | files.keys() if loaded.get(path) != files.get(path))
