"""The path that an author gives on the command line: a repository of models, or the folder of one model.

Commands that work on folders copy models of repositories in clouds before, or only their configurations.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import BadOption
from kernel.repository.clouds.address import is_address, parse_address
from kernel.repository.clouds.listing import files_of, folders_of
from kernel.repository.ensembles import parts_by_name
from kernel.repository.held_folders import new_locked_folder
from kernel.repository.layout import RepositoryContents, find_models
from kernel.repository.load_progress import bytes_text
from kernel.repository.path_hints import CONFIG_FILENAME
from kernel.repository.repositories import Repositories
from kernel.repository.source import scan
from kernel.tools.printing import progress_bar
from kernel.tools.run import is_model_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kernel.repository.clouds.address import CloudAddress
    from kernel.repository.layout import Entry, ModelFolder


class Target(msgspec.Struct, frozen=True):
    """A repository, or one model in it."""

    repository: Path
    #: The model's name; empty for all models of the repository.
    name: str = ""

    def scan(self) -> RepositoryContents:
        """List the models; with a name that model, and the models of its steps if it is an ensemble.

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


@contextlib.contextmanager
def local_folders(given: Sequence[str], *, configs_only: bool = False) -> Iterator[list[Path]]:
    """Yield a folder for each path or address; folders for addresses are removed at the end.

    Raises `BadOption`, `ServingError`.

    With `configs_only` the files from clouds are empty, but for the configurations: nothing else is received.
    """
    with contextlib.ExitStack() as stack:
        folders: list[Path] = []
        for text in given:
            if is_address(text):
                # Locked: the next server removes what a killed command has left.
                path, lock = new_locked_folder()
                stack.callback(os.close, lock)
                stack.callback(shutil.rmtree, path, ignore_errors=True)
                folder = Path(path)
                asyncio.run(_copy(parse_address(text), folder, configs_only=configs_only))
                folders.append(folder / "models")
            else:
                folders.append(Path(text))
        yield folders


async def _copy(address: CloudAddress, folder: Path, *, configs_only: bool) -> None:
    """Copy all models at `address`, or the one that it is, and link them into the folder `models` in `folder`."""
    (folder / "models").mkdir()
    repositories = Repositories([address], copies=str(folder / "copies"))
    try:
        listings = await repositories.listings()
        models = find_models(listings).models
        above, _, name = address.folder.rpartition("/")
        if name and all(map(_is_model, listings.values())):
            await repositories.close()
            repositories = Repositories([msgspec.structs.replace(address, folder=above)], copies=str(folder / "copies"))
            models = await _with_parts(repositories, name)
        if configs_only:
            await asyncio.to_thread(_write_configs, repositories, models, folder / "models")
        else:
            await _copy_models(repositories, models, folder)
    finally:
        await repositories.close()


def _is_model(entries: Sequence[Entry]) -> bool:
    """Whether a folder is a model's, as `is_model_folder`."""
    if any(each.name == CONFIG_FILENAME and not each.is_folder for each in entries):
        return True
    folders = [each for each in entries if each.is_folder and not each.name.startswith((".", "__"))]
    versions = [each for each in folders if each.name.isascii() and each.name.isdigit()]
    return bool(versions) and not any(_is_model(each.children) for each in folders)


async def _with_parts(repositories: Repositories, name: str) -> dict[str, ModelFolder]:
    """Return a model, and the models of its steps if it is an ensemble."""
    models: dict[str, ModelFolder] = {}
    looked_for, missing = set[str](), {name}
    while missing:
        looked_for |= missing
        for each in missing:
            models |= (await repositories.scan(each)).models
        parts = parts_by_name(models.values(), "", repositories.read_config)
        missing = {part for found in parts.values() for part in found} - looked_for
    return models


async def _copy_models(repositories: Repositories, models: Mapping[str, ModelFolder], folder: Path) -> None:
    with progress_bar(len(models)) as progress:
        repositories.on_copying = lambda name, received, byte_size: progress.works_on(
            f"copying {name}, {bytes_text(byte_size, received)}"
        )
        for name, model in models.items():
            progress.works_on(name)
            _, copy = await repositories.copied(model)
            assert copy is not None, "the model is in a cloud"
            (folder / "models" / name).symlink_to(copy.path)
            copy.release()
            progress.done()


def _write_configs(repositories: Repositories, models: Mapping[str, ModelFolder], folder: Path) -> None:
    """Write the folders and files of all models. Those that are not configurations are empty. Blocks."""
    for name, model in models.items():
        for path in ("", *folders_of(model.entry)):
            (folder / name / path).mkdir()
        for path in files_of(model.entry):
            (folder / name / path).write_bytes(repositories.read_config(f"{model.path}/{path}"))
