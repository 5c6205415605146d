"""What a load request brings: a configuration, and files that stand in for the model's folder.

`parse_load_parameters` checks the parameters and `file_paths` where the files may go, both without I/O;
`OverrideFolder` holds the files for as long as the model is loaded from them. Texts are those of Triton's
model_repository_manager.cc.
"""

from __future__ import annotations

import os
import posixpath
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.errors import InternalError, InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FILE_PREFIX = "file:"

#: Longest configuration that the network may send. Parsing is the server's own work, some microseconds for
#: each byte of a text that was made for it, and real ones have a few KiB.
MAX_CONFIG_BYTE_SIZE = 256 << 10

#: Largest sum of the files of one load request: a gRPC message cannot hold more either.
MAX_FILES_BYTE_SIZE = 1 << 31

#: What Triton calls the type of a parameter in its errors.
_TYPE_NAMES = {str: "STRING", bytes: "BYTES", bool: "BOOL", int: "INT", float: "DOUBLE"}


class LoadParameters(msgspec.Struct, frozen=True):
    """The parameters of a load request."""

    #: A configuration in JSON in place of the repository's.
    config: str | None = None
    #: Contents by the path within the model's folder, in place of the whole folder; none for the repository's.
    files: dict[str, bytes] = {}


class UnusableParameters(InvalidArgument):
    """What Triton finds when it polls: a client reads a general text, and the log the reason."""


def parse_load_parameters(parameters: Mapping[str, Any]) -> LoadParameters:
    """Read the parameters of a load request.

    Raises `InvalidArgument` for what is too large, and `UnusableParameters`.
    """
    config: str | None = None
    files: dict[str, bytes] = {}
    for name, value in parameters.items():
        if name == "config" and isinstance(value, str):
            config = value
        elif name.startswith(FILE_PREFIX):
            if not isinstance(value, bytes):
                raise UnusableParameters(f"File parameter '{name}' must have bytes type for its value")
            files[name.removeprefix(FILE_PREFIX)] = value
        elif name == "config" and any(key.startswith(FILE_PREFIX) for key in parameters):
            raise UnusableParameters("Config parameter 'config' must have string type for its value")
        else:
            kind = _TYPE_NAMES.get(type(value), "<invalid>")
            raise UnusableParameters(f"Unrecognized load parameter '{name}' with type '{kind}'")
    if config is not None and len(config) > MAX_CONFIG_BYTE_SIZE:
        raise InvalidArgument(
            f"load parameter 'config' has {len(config)} characters, at most {MAX_CONFIG_BYTE_SIZE} are allowed"
        )
    total = sum(map(len, files.values()))
    if total > MAX_FILES_BYTE_SIZE:
        raise InvalidArgument(
            f"the files of a load request have {total} bytes, at most {MAX_FILES_BYTE_SIZE} are allowed"
        )
    if files and config is None:
        raise UnusableParameters("Load parameter 'config' must be specified for model file override")
    return LoadParameters(config, files)


def file_paths(names: Iterable[str], folder: str) -> dict[str, str]:
    """Return where each file goes in `folder`, an absolute path without links. Raises `UnusableParameters`."""
    paths: dict[str, str] = {}
    for name in names:
        path = posixpath.normpath(posixpath.join(folder, name.lstrip("/")))
        if "\0" in name or not path.startswith(f"{folder}/"):
            raise UnusableParameters(
                f"Invalid file parameter '{FILE_PREFIX}{name}' with normalized path '{path}' must stay within "
                "model directory."
            )
        paths[name] = path
    files = set(paths.values())
    for name, path in paths.items():
        if any(str(parent) in files for parent in Path(path).parents):
            raise UnusableParameters(
                f"Invalid file parameter '{FILE_PREFIX}{name}', directory has been created as a file"
            )
    return paths


class OverrideFolder:
    """A folder of the server's own with the files of one load request, for as long as somebody uses it.

    Whoever makes it is its first user. All methods block, like all file systems.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """Make the folder and write `files`. Raises `UnusableParameters` or `InternalError`; nothing is left then."""
        self.path = os.path.realpath(tempfile.mkdtemp(prefix="naiad-model-"))
        self._uses = 1
        try:
            for name, path in file_paths(files, self.path).items():
                os.makedirs(os.path.dirname(path), exist_ok=True)
                Path(path).write_bytes(files[name])
        except (OSError, ValueError) as error:
            self.release()
            raise InternalError(f"failed to write the files of a load request: {error}") from error
        except BaseException:
            self.release()
            raise

    def retain(self) -> None:
        """Count one more user."""
        self._uses += 1

    def release(self) -> None:
        """Count one user less; the last one's going removes the folder."""
        self._uses -= 1
        if not self._uses:
            shutil.rmtree(self.path, ignore_errors=True)
