"""Which models and versions a model repository contains, from a listing of its folders. Pure.

REPOSITORY/MODEL/config.pbtxt          the configuration, may be absent
REPOSITORY/MODEL/configs/NAME.pbtxt    other configurations, to be chosen by name
REPOSITORY/MODEL/VERSION/...           the files of one version; VERSION is a number
"""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

CONFIG_FILENAME = "config.pbtxt"
CONFIGS_FOLDER = "configs"

#: Folders of a model that are no versions, and not worth a warning.
_OTHER_FOLDERS = frozenset({CONFIGS_FOLDER, "initial_state", "warmup"})

_MAX_VERSION = 2**63 - 1


class Entry(msgspec.Struct, frozen=True):
    """A file or folder. `modified_ns` of a folder is that of the newest thing in it, its own if empty."""

    name: str
    is_folder: bool = False
    modified_ns: int = 0
    children: tuple[Entry, ...] = ()

    def child(self, name: str) -> Entry | None:
        return next((entry for entry in self.children if entry.name == name), None)


class ModelFolder(msgspec.Struct, frozen=True):
    """A model in a repository. Equal values mean that nothing has changed on disk."""

    name: str
    #: The model's folder.
    path: str
    entry: Entry
    #: Version folders by number, ascending.
    versions: dict[int, Entry]
    #: What an operator should be told about folders that look like versions.
    warnings: tuple[str, ...] = ()
    #: The repository, where the same name may stand in several (--model-namespacing); else empty.
    namespace: str = ""

    @property
    def identifier(self) -> str:
        """The name by which the server tells this model from all others, as Triton prints it."""
        return f"{self.namespace}::{self.name}" if self.namespace else self.name

    def config_path(self, config_name: str = "") -> str | None:
        """Return the path of configuration `config_name` if there is one, else of config.pbtxt, or None."""
        configs = self.entry.child(CONFIGS_FOLDER)
        filename = f"{config_name}.pbtxt"
        if config_name and configs is not None and _has_file(configs, filename):
            return posixpath.join(self.path, CONFIGS_FOLDER, filename)
        return posixpath.join(self.path, CONFIG_FILENAME) if _has_file(self.entry, CONFIG_FILENAME) else None

    def first_version_files(self) -> dict[str, bool] | None:
        """Return the names in one version folder, each with whether it is a folder; None without versions.

        It is the folder whose name sorts first as text, by which Triton guesses a model's backend.
        """
        if not self.versions:
            return None
        first = min(self.versions.values(), key=lambda entry: entry.name)
        return {entry.name: entry.is_folder for entry in first.children}


class RepositoryContents(msgspec.Struct, frozen=True):
    """What all repositories together contain, by identifier in order."""

    models: dict[str, ModelFolder]
    #: Models that are in several repositories, with their folders. They cannot be loaded.
    duplicates: dict[str, tuple[str, ...]]

    def named(self, name: str) -> list[ModelFolder]:
        """Return the models called `name`: at most one without namespacing."""
        return [folder for folder in self.models.values() if folder.name == name]


def check_model_name(name: str) -> None:
    """Refuse a name that a client gave and that is not the name of a folder. Raises `InvalidArgument`."""
    if not name:
        raise InvalidArgument("Model name cannot be empty. Please enter a valid name to deploy.")
    if name.isspace():
        raise InvalidArgument("model name must not contain only whitespace characters")
    if name == "." or ".." in name or any(character in name for character in "/\\\0"):
        raise InvalidArgument(f"invalid model name '{name}', model name must not contain path traversal characters")


def model_folder(repository: str, entry: Entry, *, namespacing: bool = False) -> ModelFolder:
    """Read the listing of one model's folder in the folder `repository`."""
    return _model_folder(entry.name, posixpath.join(repository, entry.name), entry, repository if namespacing else "")


def overriding_folder(name: str, path: str, entries: tuple[Entry, ...]) -> ModelFolder:
    """Read the listing of a folder at `path` that stands in for that of model `name`."""
    return _model_folder(name, path, Entry(name, is_folder=True, children=entries), "")


def _model_folder(name: str, path: str, entry: Entry, namespace: str) -> ModelFolder:
    versions, warnings = _versions(entry)
    return ModelFolder(name, path, entry, versions, warnings, namespace)


def find_models(repositories: Mapping[str, Iterable[Entry]], *, namespacing: bool = False) -> RepositoryContents:
    """Read the listings of repositories, by their paths. Files and hidden folders are no models."""
    found: dict[str, list[ModelFolder]] = {}
    for path, entries in repositories.items():
        for entry in entries:
            if entry.is_folder and not entry.name.startswith("."):
                folder = model_folder(path, entry, namespacing=namespacing)
                found.setdefault(folder.identifier, []).append(folder)
    identifiers = sorted(found)
    return RepositoryContents(
        models={key: found[key][0] for key in identifiers if len(found[key]) == 1},
        duplicates={key: tuple(folder.path for folder in found[key]) for key in identifiers if len(found[key]) > 1},
    )


def known_names(listings: Mapping[str, Iterable[str]], *, namespacing: bool = False) -> tuple[dict[str, str], set[str]]:
    """Return the names of the models in listings of repositories, by identifier, and which are duplicates."""
    names: dict[str, str] = {}
    duplicates: set[str] = set()
    for path, found in listings.items():
        for name in found:
            identifier = f"{path}::{name}" if namespacing else name
            if identifier in names:
                duplicates.add(identifier)
            names[identifier] = name
    return names, duplicates


def _versions(model: Entry) -> tuple[dict[int, Entry], tuple[str, ...]]:
    found: dict[int, Entry] = {}
    warnings: list[str] = []
    for entry in model.children:
        if not entry.is_folder or entry.name in _OTHER_FOLDERS or entry.name.startswith("."):
            continue
        is_number = entry.name.isascii() and entry.name.isdigit()
        if is_number and entry.name.startswith("0") and entry.name != "0":
            warnings.append(
                f"ignore version directory '{entry.name}' which contains leading zeros in its directory name"
            )
        elif not is_number or len(entry.name) > 19 or int(entry.name) > _MAX_VERSION:
            warnings.append(f"ignore version directory '{entry.name}' which fails to convert to integral number")
        else:
            found[int(entry.name)] = entry
    return {version: found[version] for version in sorted(found)}, tuple(sorted(warnings))


def _has_file(folder: Entry, name: str) -> bool:
    found = folder.child(name)
    return found is not None and not found.is_folder
