"""Finds the models and versions of a model repository in a listing of its folders. Pure.

REPOSITORY/MODEL/config.pbtxt          the configuration; may be absent
REPOSITORY/MODEL/configs/NAME.pbtxt    alternative configurations, selected by name
REPOSITORY/MODEL/VERSION/...           the files of one version; VERSION is a number
"""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import InvalidArgument
from kernel.repository.path_hints import CONFIG_FILENAME, repository_hint
from kernel.serving.catalog import model_identifier
from kernel.texts import has_control, is_utf8, printable, shown_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

CONFIGS_FOLDER = "configs"
#: The traffic rule of the model (`kernel.traffic.settings`). It is no part of the model: a change loads nothing again.
TRAFFIC_FILENAME = "traffic.toml"

#: Triton's name of a shared library with batching rules.
BATCHING_LIBRARY = "batchstrategy.so"

#: Folders in a model's folder that are not versions and cause no warning.
_OTHER_FOLDERS = frozenset({CONFIGS_FOLDER, "initial_state", "warmup"})

_MAX_VERSION = 2**63 - 1

#: The longest name of a folder that file systems of Linux have.
_MAX_NAME_BYTE_SIZE = 255


class Entry(msgspec.Struct, frozen=True):
    """A file or folder. `modified_ns` of a folder is the time of its newest child, or its own time if it is empty."""

    name: str
    is_folder: bool = False
    modified_ns: int = 0
    children: tuple[Entry, ...] = ()
    #: Of a file in a cloud: what changes with its content, and its size in bytes. Empty and 0 for others.
    etag: str = ""
    byte_size: int = 0

    def child(self, name: str) -> Entry | None:
        return next((entry for entry in self.children if entry.name == name), None)


class ModelFolder(msgspec.Struct, frozen=True):
    """A model in a repository. Two equal values mean that the model has not changed on disk."""

    name: str
    #: The model's folder: a path of this machine, or an address in a cloud.
    path: str
    entry: Entry
    #: Version number → folder, ascending.
    versions: dict[int, Entry]
    #: One log line for each folder that looks like a version but is not one.
    warnings: tuple[str, ...] = ()
    #: The repository if --model-namespacing allows one name in several repositories; else empty.
    namespace: str = ""

    @property
    def identifier(self) -> str:
        """The unique name of this model in the server, in Triton's format."""
        return model_identifier(self.namespace, self.name)

    def config_path(self, config_name: str = "", copy: str = "") -> str | None:
        """Return the path of the configuration `config_name` if it exists, else of config.pbtxt, else None.

        It is in the model's folder, or in `copy`, a copy of the folder.
        """
        folder = copy or self.path
        configs = self.entry.child(CONFIGS_FOLDER)
        filename = f"{config_name}.pbtxt"
        if config_name and configs is not None and _has_file(configs, filename):
            return posixpath.join(folder, CONFIGS_FOLDER, filename)
        return posixpath.join(folder, CONFIG_FILENAME) if _has_file(self.entry, CONFIG_FILENAME) else None

    def batching_library(self) -> str:
        """Return the path, in the folder, of a library with batching rules where Triton looks for it; "" for none."""
        for folder in (*self.versions.values(), self.entry):
            if _has_file(folder, BATCHING_LIBRARY):
                return BATCHING_LIBRARY if folder is self.entry else posixpath.join(folder.name, BATCHING_LIBRARY)
        return ""

    def first_version_files(self) -> dict[str, bool] | None:
        """Return name → "is a folder" for the entries of one version folder; None if the model has no version.

        Like Triton, the server uses the version folder whose name sorts first as text to guess the backend.
        """
        if not self.versions:
            return None
        first = min(self.versions.values(), key=lambda entry: entry.name)
        return {entry.name: entry.is_folder for entry in first.children}


class TrafficFile(msgspec.Struct, frozen=True):
    """The traffic rule of a model. Two equal values mean that it has not changed."""

    path: str
    entry: Entry


class RepositoryContents(msgspec.Struct, frozen=True):
    """The models of all repositories, sorted by identifier."""

    models: dict[str, ModelFolder]
    #: Identifier → folders, of models that are in several repositories. Such a model cannot be loaded.
    duplicates: dict[str, tuple[str, ...]]
    #: Paths of folders whose names models cannot have. Hidden folders are not among them.
    misnamed: tuple[str, ...] = ()
    #: What is strange about the repositories, in words for people. Not meant for the listing of one model.
    hints: tuple[str, ...] = ()
    #: Names of models whose folders were not looked into.
    others: tuple[str, ...] = ()
    #: Name of a model → its traffic rule.
    traffic: dict[str, TrafficFile] = {}

    def named(self, name: str) -> list[ModelFolder]:
        """Return the models called `name`. Without namespacing there is at most one."""
        return [folder for folder in self.models.values() if folder.name == name]


def check_model_name(name: str) -> None:
    """Refuse a name from a client that cannot be the name of a model's folder. Raises `InvalidArgument`."""
    if not name:
        raise InvalidArgument("Model name cannot be empty. Please enter a valid name to deploy.")
    if name.isspace():
        raise InvalidArgument("model name must not contain only whitespace characters")
    if name == "." or ".." in name or any(character in name for character in "/\\\0"):
        raise InvalidArgument(f"invalid model name '{name}', model name must not contain path traversal characters")
    if has_control(name):
        raise InvalidArgument(f"invalid model name '{printable(name)}', model name must not contain control characters")
    if not is_utf8(name):
        raise InvalidArgument(f"invalid model name '{shown_text(name, _MAX_NAME_BYTE_SIZE)}', it is not UTF-8")
    if (byte_size := len(name.encode())) > _MAX_NAME_BYTE_SIZE:
        raise InvalidArgument(
            f"invalid model name '{name}', model name must have at most {_MAX_NAME_BYTE_SIZE} bytes, it has {byte_size}"
        )


def can_be_model(folder: str) -> bool:
    """Whether a folder of this name in a repository is a model. Hidden folders are not.

    Nor are those with control characters in their names, or with bytes that are not UTF-8, which Triton serves: the
    name would be in metrics, tables and logs, and neither HTTP nor gRPC can carry it.
    """
    return not folder.startswith(".") and not has_control(folder) and is_utf8(folder)


def model_folder(repository: str, entry: Entry, *, namespacing: bool = False) -> ModelFolder:
    """Return the model of one folder in `repository`; `entry` is the folder's listing."""
    return _model_folder(entry.name, posixpath.join(repository, entry.name), entry, repository if namespacing else "")


def overriding_folder(name: str, path: str, entries: tuple[Entry, ...]) -> ModelFolder:
    """Return model `name` with the folder at `path`, whose listing is `entries`, instead of a repository's folder."""
    return _model_folder(name, path, Entry(name, is_folder=True, children=entries), "")


def without_traffic(model: Entry) -> Entry:
    """Return the listing of a model's folder without its traffic rule."""
    if not _has_file(model, TRAFFIC_FILENAME):
        return model
    children = tuple(child for child in model.children if child.name != TRAFFIC_FILENAME)
    modified_ns = max((child.modified_ns for child in children), default=model.modified_ns)
    return msgspec.structs.replace(model, children=children, modified_ns=modified_ns)


def _model_folder(name: str, path: str, entry: Entry, namespace: str) -> ModelFolder:
    entry = without_traffic(entry)
    versions, warnings = _versions(entry)
    return ModelFolder(name, path, entry, versions, warnings, namespace)


def find_models(repositories: Mapping[str, Iterable[Entry]], *, namespacing: bool = False) -> RepositoryContents:
    """Return the models in `repositories`: path → listing. Files are not models, see also `can_be_model`."""
    found: dict[str, list[ModelFolder]] = {}
    misnamed: list[str] = []
    hints: list[str] = []
    traffic: dict[str, TrafficFile] = {}
    for path, listing in repositories.items():
        entries = tuple(listing)
        if hint := repository_hint(path, entries):
            hints.append(hint)
        for entry in entries:
            if not entry.is_folder or entry.name.startswith("."):
                continue
            if not can_be_model(entry.name):
                misnamed.append(posixpath.join(path, entry.name))
            else:
                folder = model_folder(path, entry, namespacing=namespacing)
                found.setdefault(folder.identifier, []).append(folder)
                if (rule := entry.child(TRAFFIC_FILENAME)) is not None and not rule.is_folder:
                    traffic[entry.name] = TrafficFile(posixpath.join(folder.path, TRAFFIC_FILENAME), rule)
    identifiers = sorted(found)
    return RepositoryContents(
        models={key: found[key][0] for key in identifiers if len(found[key]) == 1},
        duplicates={key: tuple(folder.path for folder in found[key]) for key in identifiers if len(found[key]) > 1},
        misnamed=tuple(misnamed),
        hints=tuple(hints),
        traffic=traffic,
    )


def known_names(listings: Mapping[str, Iterable[str]], *, namespacing: bool = False) -> tuple[dict[str, str], set[str]]:
    """Return identifier → name of the models in `listings` (path → folder names), and the duplicate identifiers."""
    names: dict[str, str] = {}
    duplicates: set[str] = set()
    for path, found in listings.items():
        for name in found:
            identifier = model_identifier(path, name) if namespacing else name
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
