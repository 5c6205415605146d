"""The objects of a store as the files and folders of a repository. Pure.

Stores have no folders: the names of objects have slashes in them, and may be what no path can be. An object whose name
ends with a slash is a folder, as the consoles of the clouds make them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.repository.layout import Entry
from kernel.texts import is_utf8

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kernel.repository.clouds.messages import StoredObject

#: As in listings of local folders: Python's own files, and how many folders may be inside one another.
_IGNORED = "__pycache__"
_MAX_DEPTH = 100
_MAX_NAME_BYTE_SIZE = 255

#: The clients of the stores would read another object, of which it says the version.
_VERSION = "?versionid="


class _Folder:
    """A folder that is being filled."""

    def __init__(self) -> None:
        self.folders: dict[str, _Folder] = {}
        self.files: dict[str, StoredObject] = {}


def entries_of(objects: Iterable[StoredObject]) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
    """Return the entries of a folder, sorted by name, and names of objects that cannot be files and are left out.

    Where one name is both a file and a folder, it is the folder.
    """
    top, left_out = _Folder(), []
    for each in objects:
        is_folder = each.name.endswith("/")
        parts = each.name.removesuffix("/").split("/")
        if _IGNORED in parts:
            continue
        if not _can_be_path(parts):
            left_out.append(each.name)
            continue
        folder = top
        for part in parts if is_folder else parts[:-1]:
            folder = folder.folders.setdefault(part, _Folder())
        if not is_folder:
            folder.files[parts[-1]] = each
    left_out += _hidden_by_folders(top)
    return _entries(top), tuple(left_out)


def files_of(model: Entry) -> dict[str, Entry]:
    """Return path in the folder → file, of all files in it."""
    return dict(_files(model, ""))


def folders_of(model: Entry, path: str = "") -> list[str]:
    """Return the paths of all folders in a folder, each after the one that it is in."""
    found: list[str] = []
    for entry in model.children:
        if entry.is_folder:
            found += [f"{path}{entry.name}", *folders_of(entry, f"{path}{entry.name}/")]
    return found


def _can_be_path(parts: list[str]) -> bool:
    """Whether the parts of an object's name can be names of folders and of a file, and stay in the repository."""
    return len(parts) <= _MAX_DEPTH and all(
        part not in ("", ".", "..")
        and is_utf8(part)
        and "\0" not in part
        and "\\" not in part
        and _VERSION not in part.lower()
        and len(part.encode()) <= _MAX_NAME_BYTE_SIZE
        for part in parts
    )


def _hidden_by_folders(folder: _Folder) -> list[str]:
    hidden = [folder.files.pop(name).name for name in folder.folders.keys() & folder.files.keys()]
    return hidden + [name for inner in folder.folders.values() for name in _hidden_by_folders(inner)]


def _entries(folder: _Folder) -> tuple[Entry, ...]:
    found = [
        Entry(name, modified_ns=each.modified_ns, byte_size=each.byte_size, etag=each.etag)
        for name, each in folder.files.items()
    ]
    for name, inner in folder.folders.items():
        children = _entries(inner)
        modified_ns = max((child.modified_ns for child in children), default=0)
        found.append(Entry(name, is_folder=True, modified_ns=modified_ns, children=children))
    return tuple(sorted(found, key=lambda entry: entry.name))


def _files(folder: Entry, path: str) -> Iterator[tuple[str, Entry]]:
    for entry in folder.children:
        if entry.is_folder:
            yield from _files(entry, f"{path}{entry.name}/")
        else:
            yield f"{path}{entry.name}", entry
