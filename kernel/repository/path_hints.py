"""Hints for a path that is not a model repository: a wrong path, the folder of one model, an empty folder. Pure."""

from __future__ import annotations

import posixpath
import re
from typing import TYPE_CHECKING, Protocol

from kernel.repository.clouds.address import CLOUDS

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

#: The configuration of a model in its folder.
CONFIG_FILENAME = "config.pbtxt"

#: The begin of an address; a path has only one of the two slashes.
_CLOUD = re.compile(r"(s3|gs|as|az|abfss?|https?|hdfs|hf):/+(.*)", re.IGNORECASE)

#: Files of models by the format that they usually have.
MODEL_ENDINGS = (".onnx", ".py", ".pt", ".pt2", ".plan", ".xml", ".graphdef", ".savedmodel", ".skops", ".joblib",
                 ".pkl", ".pickle", ".ubj", ".tl")  # fmt: skip


class Listed(Protocol):
    """A file or folder in a listing. Implemented by `kernel.repository.layout.Entry`."""

    @property
    def name(self) -> str: ...

    @property
    def is_folder(self) -> bool: ...

    @property
    def children(self) -> Sequence[Listed]: ...


def path_hint(path: str, *, is_file: bool, siblings: Collection[str] = ()) -> str:
    """Return the hint for the path of a repository that is not a folder. `siblings` are beside it: the folders, or for
    the path of a model's file the files of that format."""
    cloud = _CLOUD.fullmatch(path)
    if cloud is not None:
        if cloud[1] in CLOUDS:
            return f"an address in a cloud has two slashes, '{cloud[1]}://{cloud[2]}': give it as text, not as a path"
        known = ", ".join(f"{each}://" for each in CLOUDS)
        return (
            f"the addresses of repositories begin with {known}; copy models from elsewhere into a folder of this "
            "machine, and give that"
        )
    if is_file:
        folder = posixpath.dirname(path) or "."
        if posixpath.basename(path) == CONFIG_FILENAME:
            return f"it is the configuration of a model: give the repository, the folder above '{folder}'"
        ending = posixpath.splitext(path)[1]
        if ending in MODEL_ENDINGS:
            return f"it is a file; give a folder of models, in which this one is at NAME/1/model{ending}"
        return "it is a file; give a folder of models, or a model whose name ends with .onnx, .py or .plan"
    import difflib  # imported late: few repositories need a hint

    close = difflib.get_close_matches(posixpath.basename(path), siblings, n=1)
    if posixpath.splitext(path)[1] in MODEL_ENDINGS and not close:
        return "there is no such file either"
    return f"did you mean '{posixpath.join(posixpath.dirname(path), close[0])}'?" if close else ""


def repository_hint(path: str, entries: Sequence[Listed]) -> str:
    """Return the hint for the repository at `path` with this listing; empty if there is nothing strange about it."""
    files = [entry.name for entry in entries if not entry.is_folder]
    folders = [entry for entry in entries if entry.is_folder and not entry.name.startswith(".")]
    versions = [folder for folder in folders if folder.name.isdecimal()]
    from kernel.config.autofill import FORMATS  # imported late: it imports protobuf, and `naiad ready` this module

    filenames = {each.filename for each in FORMATS}
    has_model = any(child.name in filenames for folder in versions for child in folder.children)
    if folders and len(versions) == len(folders) and (CONFIG_FILENAME in files or has_model):
        above = posixpath.dirname(path.rstrip("/")) or "."
        return f"'{path}' is the folder of one model: give the folder above it as the repository, '{above}'"
    if folders:
        return ""
    onnx = next((name for name in files if name.endswith(".onnx")), "")
    if onnx:
        file = posixpath.join(path, onnx)
        name = onnx.removesuffix(".onnx")
        return (
            f"'{path}' has no folders of models: serve one file with 'naiad run {file}', or put it at "
            f"'{posixpath.join(path, name, '1', 'model.onnx')}'"
        )
    if CONFIG_FILENAME in files:
        return (
            f"'{path}' has a config.pbtxt and no folders: a model has a folder of its own in the repository, and its "
            "files are in a folder of a version, such as NAME/1/model.onnx"
        )
    return (
        f"the repository '{path}' has no models: each is a folder with its files in a folder of a version, such as "
        f"'{posixpath.join(path, 'NAME', '1', 'model.onnx')}'"
    )


def name_hint(name: str, names: Collection[str]) -> str:
    """Return the hint for a model that no repository has; `names` are those that there are."""
    import difflib  # imported late: few repositories need a hint

    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"did you mean '{close[0]}'?"
    if not names:
        return "the repositories have no models"
    shown = ", ".join(f"'{each}'" for each in sorted(names)[:5])
    return f"the repositories have {shown}{' and more' if len(names) > 5 else ''}"
