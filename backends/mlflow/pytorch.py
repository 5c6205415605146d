"""A model of PyTorch in an MLflow folder, called as MLflow's flavour `pytorch` calls it; mlflow is not needed.

TorchScript and programs of `torch.export` are loaded as the backend `pytorch` does, which opens no pickles. Modules
that `torch.save` has written are pickles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from backends.pytorch.library import TORCH_ERRORS, load_torch
from backends.pytorch.model_file import FileFormat, load_exported, read_format
from backends.sklearn.model_file import check_pickles_allowed
from kernel.errors import InternalError, InvalidArgument, ServingError, Unavailable, failing_as
from kernel.machine import processor_count

if TYPE_CHECKING:
    from pathlib import Path

    from backends.base import ModelArguments
    from shm.arrays import Array

#: In the folder that the file MLmodel names, in the order in which MLflow looks for them.
_FILES = ("model.pth", "model.pt2")


class PytorchPredictor:
    """A module that takes one tensor and returns one. See `Predictor`."""

    feature_count = 0
    feature_names: tuple[str, ...] = ()
    takes_tables = True
    takes_texts = False
    takes_dictionaries = False
    compares_names = False

    def __init__(self, arguments: ModelArguments, path: Path) -> None:
        """Load the model file at `path`, or in this folder. No pickle is opened unless it is allowed.

        Raises `ServingError`.
        """
        model = arguments.model_name
        path = _file(path, model)
        file_format = _format(path, model)
        if file_format not in (FileFormat.TORCHSCRIPT, FileFormat.EXPORTED):
            check_pickles_allowed(
                arguments,
                f"is a pickle ('{path.name}'), and a pickle",
                "A scripted model needs no flag, nor one that is saved with serialization_format='pt2'",
            )
        torch = self._torch = load_torch()
        torch.set_num_threads(processor_count())
        with failing_as(
            lambda error: InternalError(
                f"failed to load model '{model}': '{path.name}' cannot be read: {type(error).__name__}: {error}"
            )
        ):
            self._module = _load(torch, path, file_format)

    def predict(self, rows: Any) -> Array:
        try:
            array = rows if isinstance(rows, np.ndarray) else rows.to_numpy(dtype=np.float32)
            # An array that is read-only is memory of a client, and a module may change its input.
            given = self._torch.from_numpy(np.ascontiguousarray(array) if array.flags.writeable else array.copy())
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"predict: {error}") from error
        try:
            with self._torch.no_grad():
                found = self._module(given)
            if not isinstance(found, self._torch.Tensor):
                raise TypeError(f"the model has returned a {type(found).__name__}; expected one tensor")
            result: Array = found.cpu().numpy()
        except TORCH_ERRORS as error:
            raise InternalError(f"PyTorch execute failure: {error}") from error
        if not result.ndim:
            raise InternalError("the model has returned a single number for all rows")
        return result.reshape(len(result), 1) if result.ndim == 1 else result


def _file(path: Path, model: str) -> Path:
    if not path.is_dir():
        return path
    for name in _FILES:
        if (path / name).is_file():
            return path / name
    raise Unavailable(f"unable to find a file for model '{model}' in '{path}': expected one of {', '.join(_FILES)}")


def _format(path: Path, model: str) -> FileFormat | None:
    """Return the format of a file; None for what `torch.save` has written, which may be no archive."""
    try:
        return read_format(path, model)
    except ServingError:
        return None


def _load(torch: Any, path: Path, file_format: FileFormat | None) -> Any:
    if file_format is FileFormat.TORCHSCRIPT:
        return torch.jit.load(str(path), map_location="cpu").eval()
    if file_format is FileFormat.EXPORTED:
        return load_exported(torch, path).module()
    # The file pickle_module_info.txt names a module to import. It is not used: pickle opens what cloudpickle writes.
    return torch.load(str(path), map_location="cpu", weights_only=False).eval()
