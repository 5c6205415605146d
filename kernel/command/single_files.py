"""Serves ONNX files that are in no model repository, `naiad run model.onnx`: makes a repository with links to them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kernel.options import BadOption, ServerOptions
from kernel.repository.held_folders import new_locked_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Ends of names of files that hold the weights of an ONNX file beside them. An exporter may choose any name.
_WEIGHTS = (".data", "_data", ".weights", ".bin")

#: What a name of a model is not to contain: it is in URLs.
_UNUSUAL = re.compile(r"[^\w.-]+", re.ASCII)


@contextlib.contextmanager
def repositories_of_files(options: ServerOptions) -> Iterator[ServerOptions]:
    """Yield the options with a repository in place of each ONNX file. The repositories are removed at the end.

    Two files of the same name get two models, `NAME` and `NAME-2`. Raises `BadOption` if links cannot be made.
    """
    files = options.repository.onnx_files
    with _repository_of(files) as folder:
        paths = dict.fromkeys(folder if path in files else path for path in options.repository.paths)
        repository = msgspec.structs.replace(options.repository, paths=tuple(paths))
        yield msgspec.structs.replace(options, repository=repository)


@contextlib.contextmanager
def folders_of_files(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield `paths` with a repository in place of all ONNX files; it is removed at the end. Raises `BadOption`."""
    files = [path for path in paths if path.suffix == ".onnx" and path.is_file()]
    if not files:
        yield list(paths)
        return
    with _repository_of(files) as folder:
        yield list(dict.fromkeys(folder if path in files else path for path in paths))


@contextlib.contextmanager
def _repository_of(files: Sequence[Path]) -> Iterator[Path]:
    """Yield a new repository with a model for each file. Raises `BadOption`."""
    with contextlib.ExitStack() as stack:
        try:
            folder, lock = new_locked_folder()
            stack.callback(os.close, lock)
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            names: set[str] = set()
            for path in files:
                _link(path, Path(folder) / _new_name(path, names))
        except OSError as error:
            raise BadOption(f"the model in '{files[0]}' cannot be served: {error}") from None
        yield Path(folder)


def _new_name(path: Path, taken: set[str]) -> str:
    """Return a name for the model of a file, and add it to `taken`: made of the name of the file."""
    base = _UNUSUAL.sub("-", path.stem).strip("-.") or "model"
    name, number = base, 1
    while name in taken:
        number += 1
        name = f"{base}-{number}"
    taken.add(name)
    return name


def _link(path: Path, model: Path) -> None:
    """Make the folder `model` of a model whose file is at `path`. Weights beside the file are linked, too."""
    version = model / "1"
    version.mkdir(parents=True)
    file = path.resolve()
    (version / "model.onnx").symlink_to(file)
    for beside in file.parent.iterdir():
        is_weights = beside.name.startswith(file.stem) or beside.name.endswith(_WEIGHTS)
        if beside != file and is_weights and beside.is_file() and beside.name != "model.onnx":
            (version / beside.name).symlink_to(beside)
