"""`naiad run`: reads the flags and runs the server. Imports nothing that only other commands need.

Models may be given without a repository: `naiad run resnet.onnx`, `naiad run model.json`, `naiad run models/one`. A new
repository then has links to them. `KINDS` says which files are models.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import BadOption
from kernel.options import ServerOptions, check_options
from kernel.repository.held_folders import new_locked_folder
from kernel.repository.path_hints import CONFIG_FILENAME
from kernel.tree_files import TREE_FILE_NAMES, TREE_HEAD_BYTE_SIZE, tree_file_type

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kernel.repository.clouds.address import CloudAddress

#: What a name of a model is not to contain: it is in URLs.
_UNUSUAL = re.compile(r"[^\w.-]+", re.ASCII)

#: The most entries beside a file that are linked. A model that needs more is a folder.
_MAX_BESIDE = 1000


class ModelFileKind(msgspec.Struct, frozen=True):
    """A kind of files that are models."""

    #: What the file is called in the folder of a version.
    filename: str
    #: Returns whether an entry beside the file belongs to the model. Its arguments are the file and the entry.
    belongs: Callable[[Path, Path], bool] = lambda file, beside: False
    #: Whether only the content of the file says whether it is a model, and of which type.
    by_content: bool = False


def _is_weights(file: Path, beside: Path) -> bool:
    """Whether `beside` may hold weights of an ONNX file. An exporter may choose any name."""
    named = beside.name.startswith(file.stem) or beside.name.endswith((".data", "_data", ".weights", ".bin"))
    return named and beside.is_file()


def _is_importable_or_data(file: Path, beside: Path) -> bool:
    """Whether the code of a Python model may use `beside`: files, and packages."""
    return beside.is_file() or (beside / "__init__.py").is_file()


#: File name extension → kind.
KINDS = {
    ".bst": ModelFileKind("", by_content=True),
    ".joblib": ModelFileKind("model.joblib"),
    ".json": ModelFileKind("", by_content=True),
    ".model": ModelFileKind("", by_content=True),
    ".onnx": ModelFileKind("model.onnx", _is_weights),
    ".pickle": ModelFileKind("model.pickle"),
    ".pkl": ModelFileKind("model.pkl"),
    ".plan": ModelFileKind("model.plan"),
    ".pt": ModelFileKind("model.pt"),
    ".pt2": ModelFileKind("model.pt2"),
    ".py": ModelFileKind("model.py", _is_importable_or_data),
    ".skops": ModelFileKind("model.skops"),
    ".tl": ModelFileKind("", by_content=True),
    ".txt": ModelFileKind("", by_content=True),
    ".ubj": ModelFileKind("", by_content=True),
}


def file_kind(path: Path) -> ModelFileKind | None:
    """Return the kind of a file that is a model; None for another file, or a folder. Blocks. Raises `OSError`."""
    kind = KINDS.get(path.suffix)
    if kind is None or not path.is_file():
        return None
    if kind.by_content:
        found = tree_file_type(_head(path))
        return ModelFileKind(TREE_FILE_NAMES[found]) if found else None
    return kind


def is_model_folder(path: Path) -> bool:
    """Whether a folder is a model's: it has a configuration, or versions and nothing that could be a model.

    Blocks.
    """
    if (path / CONFIG_FILENAME).is_file():
        return True
    folders = [each for each in path.iterdir() if not each.name.startswith((".", "__")) and each.is_dir()]
    if not any(each.name.isascii() and each.name.isdigit() for each in folders):
        return False
    return not any(is_model_folder(each) for each in folders)


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(TREE_HEAD_BYTE_SIZE)


def is_mlflow_folder(path: Path) -> bool:
    """Whether a folder is what MLflow saves as a model: it is a version of a model, and no folder of one. Blocks."""
    return (path / "MLmodel").is_file()


def is_single_model(path: Path) -> bool:
    """Whether `path` is a model: a file of a known kind, or the folder of one model. Blocks."""
    try:
        return file_kind(path) is not None or (path.is_dir() and (is_mlflow_folder(path) or is_model_folder(path)))
    except OSError:
        return False  # the server says what is wrong with it


@contextlib.contextmanager
def options_with_repositories(options: ServerOptions) -> Iterator[ServerOptions]:
    """Yield the options with one repository in place of all single models. The repository is removed at the end.

    Two models of the same name get two names, `NAME` and `NAME-2`. Raises `BadOption` if links cannot be made.
    """
    with with_repositories(options.repository.paths) as paths:
        repository = msgspec.structs.replace(options.repository, paths=tuple(paths))
        yield msgspec.structs.replace(options, repository=repository)


@contextlib.contextmanager
def with_repositories(paths: Sequence[Path | CloudAddress]) -> Iterator[list[Path | CloudAddress]]:
    """Yield `paths` with one repository in place of all single models; it is removed at the end.

    Raises `BadOption` if links cannot be made.
    """
    models = [path for path in paths if isinstance(path, Path) and is_single_model(path)]
    if not models:
        yield list(paths)
        return
    with _repository_of(models) as folder:
        yield list(dict.fromkeys(folder if path in models else path for path in paths))


@contextlib.contextmanager
def folders_of(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield `paths` with one repository in place of all files that are models, for commands that take model folders.

    Raises `BadOption` if links cannot be made.
    """
    files = [path for path in paths if path.is_file() and is_single_model(path)]
    if not files:
        yield list(paths)
        return
    with _repository_of(files) as folder:
        yield list(dict.fromkeys(folder if path in files else path for path in paths))


@contextlib.contextmanager
def _repository_of(models: Sequence[Path]) -> Iterator[Path]:
    """Yield a new repository with all `models`. Raises `BadOption`."""
    with contextlib.ExitStack() as stack:
        try:
            folder, lock = new_locked_folder()
            stack.callback(os.close, lock)
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            names: set[str] = set()
            for path in models:
                if path.is_dir() and is_mlflow_folder(path):
                    _link_version(path, Path(folder) / _new_name(path.resolve().name, names))
                elif path.is_dir():
                    (Path(folder) / _new_name(path.resolve().name, names)).symlink_to(path.resolve())
                else:
                    _link(path, Path(folder) / _new_name(_model_name(path), names))
        except OSError as error:
            raise BadOption(f"the model in '{models[0]}' cannot be served: {error}") from None
        yield Path(folder)


def _model_name(file: Path) -> str:
    """Return a name for the model of a file: the file's own, or its folder's if the file is only called `model`."""
    if file.stem != "model":
        return file.stem
    folder = file.resolve().parent
    if folder.name.isdecimal():  # a version's folder
        folder = folder.parent
    return folder.name or file.stem


def _new_name(wanted: str, taken: set[str]) -> str:
    """Return a name like `wanted` that a URL can have, and add it to `taken`."""
    base = _UNUSUAL.sub("-", wanted).strip("-.") or "model"
    name, number = base, 1
    while name in taken:
        number += 1
        name = f"{base}-{number}"
    taken.add(name)
    return name


def _link(path: Path, model: Path) -> None:
    """Make the folder `model` of a model whose file is at `path`, with links to what belongs to it.

    A configuration beside the file is the model's.
    """
    kind = file_kind(path)
    if kind is None:
        raise OSError("it has changed, and is no model any more")
    version = model / "1"
    version.mkdir(parents=True)
    file = path.resolve()
    (version / kind.filename).symlink_to(file)
    for beside in islice(_visible(file.parent), _MAX_BESIDE):
        if beside.name == CONFIG_FILENAME:
            (model / CONFIG_FILENAME).symlink_to(beside)
        elif beside != file and beside.name != kind.filename and kind.belongs(file, beside):
            (version / beside.name).symlink_to(beside)


def _link_version(version: Path, model: Path) -> None:
    """Make the folder `model` of a model with the folder `version`. A configuration there is the model's."""
    model.mkdir()
    (model / "1").symlink_to(version.resolve())
    if (version / CONFIG_FILENAME).is_file():
        (model / CONFIG_FILENAME).symlink_to((version / CONFIG_FILENAME).resolve())


def _visible(folder: Path) -> Iterable[Path]:
    return (each for each in folder.iterdir() if not each.name.startswith("."))


def run_server(arguments: list[str]) -> int:
    """Serve with the flags in `arguments`, or print the help; returns the exit code. Raises `BadOption`."""
    if "--help" in arguments or "-h" in arguments:
        from kernel.flags.help import print_help

        print_help()
        return 0
    from kernel.flags.read import read_flags

    options, notes = read_flags(arguments, os.environ, variables=True)
    with options_with_repositories(options) as options_with_folders:
        return _start(options_with_folders, notes)


def _start(options: ServerOptions, notes: list[str]) -> int:
    check_options(options)
    from kernel.start import start  # imported late: wrong flags do not need the server

    return start(options, notes)
