"""Repositories in clouds for commands that work on folders: all models are copied before."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from kernel.authoring.progress import progress_bar
from kernel.errors import ServingError
from kernel.options import BadOption
from kernel.repository.clouds.address import BadAddress, is_address, parse_address
from kernel.repository.held_folders import new_locked_folder
from kernel.repository.load_progress import bytes_text
from kernel.repository.repositories import Repositories

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kernel.repository.clouds.address import CloudAddress


@contextlib.contextmanager
def local_folders(given: Sequence[str]) -> Iterator[list[Path]]:
    """Yield a folder for each path or address; those of addresses are removed at the end. Raises `BadOption`."""
    with contextlib.ExitStack() as stack:
        folders: list[Path] = []
        for text in given:
            if is_address(text):
                # Locked: the next server removes what a killed command has left.
                path, lock = new_locked_folder()
                stack.callback(os.close, lock)
                stack.callback(shutil.rmtree, path, ignore_errors=True)
                folder = Path(path)
                try:
                    asyncio.run(_copy(parse_address(text), folder))
                except BadAddress as error:
                    raise BadOption(str(error)) from None
                except ServingError as error:
                    raise BadOption(error.message) from None
                folders.append(folder / "models")
            else:
                folders.append(Path(text))
        yield folders


async def _copy(address: CloudAddress, folder: Path) -> None:
    """Copy all models at `address`, and link them into the folder `models` in `folder`."""
    (folder / "models").mkdir()
    repositories = Repositories([address], copies=str(folder / "copies"))
    try:
        found = await repositories.scan()
        with progress_bar(len(found.models)) as progress:
            repositories.on_copying = lambda name, received, byte_size: progress.works_on(
                f"{name}, {bytes_text(byte_size, received)}"
            )
            for name, model in found.models.items():
                progress.works_on(name)
                _, copy = await repositories.copied(model)
                assert copy is not None, "the model is in a cloud"
                (folder / "models" / name).symlink_to(copy.path)
                copy.release()
                progress.done()
    finally:
        await repositories.close()
