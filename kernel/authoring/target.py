"""The path that an author gives on the command line: a repository of models, or the folder of one model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.options import BadOption
from kernel.repository.composition import parts_by_name
from kernel.repository.layout import CONFIG_FILENAME, RepositoryContents
from kernel.repository.local import is_model_folder
from kernel.repository.source import scan

if TYPE_CHECKING:
    from pathlib import Path


class Target(msgspec.Struct, frozen=True):
    """A repository, or one model in it."""

    repository: Path
    #: The model's name; empty for all models of the repository.
    name: str = ""

    def scan(self) -> RepositoryContents:
        """List the models; with a name that model, and those of its steps if it is an ensemble.

        Blocks. Raises `ServingError` if a folder cannot be read.
        """
        contents = scan((self.repository,), only=self.name)
        if not self.name:
            return contents
        models, looked_for = dict(contents.models), {self.name}
        while missing := {part for parts in parts_by_name(models.values(), "").values() for part in parts} - looked_for:
            looked_for |= missing
            for name in missing:
                models |= scan((self.repository,), only=name).models
        return RepositoryContents(models, contents.duplicates, contents.misnamed)


def find_target(path: Path) -> Target:
    """Return what is at `path`. Raises `BadOption` if that is not a folder."""
    if not path.is_dir():
        raise BadOption(f"'{path}' is not a folder. Give the folder of a model, or a folder of models")
    if is_model_folder(path):
        resolved = path.resolve()
        return Target(resolved.parent, resolved.name)
    return Target(path)


def model_target(path: Path) -> Target:
    """Return the model at `path`. Raises `BadOption` if that is not a model's folder."""
    found = find_target(path)
    if not found.name:
        inside = sorted(each.name for each in path.iterdir() if each.is_dir() and is_model_folder(each))
        hint = f"; it has models: give one of them, such as {path / inside[0]}" if inside else ""
        raise BadOption(f"'{path}' is not the folder of a model: there is no {CONFIG_FILENAME} and no version{hint}")
    return found
