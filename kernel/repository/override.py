"""The parameters of a load request: a configuration, and files that replace the model's folder.

`parse_load_parameters` checks the parameters, `file_paths` checks the files' paths; both do no I/O.
`OverrideFolder` keeps the files while a version that was loaded from them has workers. Error texts are those
of Triton's model_repository_manager.cc.
"""

from __future__ import annotations

import errno
import os
import posixpath
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.errors import InvalidArgument, file_error
from kernel.repository.held_folders import HeldFolder, new_locked_folder
from kernel.texts import limited

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kernel.errors import ServingError

FILE_PREFIX = "file:"

#: The longest configuration that a load request may have. Real ones have a few KiB; parsing a malicious one
#: takes the server some microseconds per byte, and with 256 KiB others waited up to 70 ms.
MAX_CONFIG_BYTE_SIZE = 128 << 10

#: The largest sum of the files of one load request; also the limit of a gRPC message.
MAX_FILES_BYTE_SIZE = 1 << 31

#: The most bytes of a path of a load request, and the most folders in it.
MAX_PATH_BYTE_SIZE = 1024
MAX_PATH_DEPTH = 32

#: Triton's names for the types of parameters in its errors.
_TYPE_NAMES = {str: "STRING", bytes: "BYTES", bool: "BOOL", int: "INT", float: "DOUBLE"}


class LoadParameters(msgspec.Struct, frozen=True):
    """The parameters of a load request."""

    #: A configuration in JSON that replaces the one in the repository.
    config: str | None = None
    #: Path in the model's folder → content. The files replace the whole folder; empty to use the repository's.
    files: dict[str, bytes | memoryview] = {}


class UnusableParameters(InvalidArgument):
    """An error that Triton finds while it polls. The log has the reason; the client gets a general text."""


def parse_load_parameters(parameters: Mapping[str, Any]) -> LoadParameters:
    """Parse the parameters of a load request.

    Raises `UnusableParameters`, also for a path that is too long or too deep, or `InvalidArgument` if another limit is
    exceeded: of the configuration, of the files together.
    """
    config: str | None = None
    files: dict[str, bytes | memoryview] = {}
    for name, value in parameters.items():
        if name == "config" and isinstance(value, str):
            config = value
        elif name.startswith(FILE_PREFIX):
            if not isinstance(value, (bytes, memoryview)):
                raise UnusableParameters(f"File parameter '{name}' must have bytes type for its value")
            _check_length(name)
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


def _check_length(name: str) -> None:
    """Refuse a long or deep path before it is split or made: folders are created and removed by recursion."""
    byte_size, shown = len(name.encode(errors="surrogatepass")) - len(FILE_PREFIX), limited(name, MAX_PATH_BYTE_SIZE)
    if byte_size > MAX_PATH_BYTE_SIZE:
        raise UnusableParameters(
            f"the path of file parameter '{shown}' has {byte_size} bytes, at most {MAX_PATH_BYTE_SIZE} are allowed"
        )
    depth = len([part for part in name.removeprefix(FILE_PREFIX).split("/")[:-1] if part])
    if depth > MAX_PATH_DEPTH:
        raise UnusableParameters(
            f"the path of file parameter '{shown}' has {depth} folders, at most {MAX_PATH_DEPTH} are allowed"
        )


def file_paths(names: Iterable[str], folder: str) -> dict[str, str]:
    """Return the path of each file in `folder`, an absolute path without links. Raises `UnusableParameters`."""
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


class OverrideFolder(HeldFolder):
    """A temporary folder with the files of one load request. The folder is removed with its last use.

    It is locked as long as it is used. The lock ends with the process, however that ends: `remove_abandoned_folders`
    of the next server removes what a killed one has left. The code that creates it holds the first use. All methods
    block on the file system.
    """

    def __init__(self, files: Mapping[str, bytes | memoryview]) -> None:
        """Create the folder and write `files`. On a `ServingError` the folder is removed."""
        try:
            self.path, self._lock_fd = new_locked_folder()
        except OSError as error:
            raise _not_written(error) from error
        super().__init__()
        try:
            for name, path in file_paths(files, self.path).items():
                os.makedirs(os.path.dirname(path), exist_ok=True)
                Path(path).write_bytes(files[name])
        except OSError as error:
            self.release()
            raise _not_written(error) from error
        except ValueError as error:  # no file can have this name
            self.release()
            raise UnusableParameters(f"the files of a load request cannot be written: {error}") from error
        except BaseException:
            self.release()
            raise

    def _remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)


def _not_written(error: OSError) -> ServingError:
    if error.errno == errno.ENAMETOOLONG:
        return UnusableParameters(f"the files of a load request cannot be written: {error}")
    return file_error(f"failed to write the files of a load request: {error.strerror}", error)
