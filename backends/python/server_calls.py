"""Functions of `pb_utils` with which a model loads and unloads models, and asks whether a model is ready.

A model may call them in `initialize` and later, from any thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.python.conversions import as_text
from backends.python.failures import TritonModelException, incompatible_arguments, is_truth
from backends.python.instance import current_instance
from kernel.errors import ServingError

if TYPE_CHECKING:
    from collections.abc import Mapping

_LOAD = "load_model(model_name: str, config: str = '', files: object = None) -> None"
_UNLOAD = "unload_model(model_name: str, unload_dependents: bool = False) -> None"
#: Triton's words.
_FAILURES = {
    "load": "Failed to load model",
    "unload": "Failed to unload model",
    "ready": "Failed to check model readiness",
}

_READY = "is_model_ready(model_name: str, model_version: str = '') -> bool"


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load or reload a model, and return when it is ready.

    `config` is a configuration in JSON that replaces the one in the repository. `files` (`file:<path>` → bytes) replace
    the model's folder. The server must have explicit model control. Raises `TritonModelException` if the load fails.
    """
    name, text = as_text(model_name), as_text(config)
    if name is None or text is None:
        raise incompatible_arguments("load_model", _LOAD, model_name, config, files)
    if files is not None:
        if not isinstance(files, dict):
            raise TritonModelException("failed to parse `files` when loading model: not a dictionary")
        for path, data in files.items():
            if not isinstance(path, str) or not isinstance(data, bytes):
                raise incompatible_arguments("load_model", _LOAD, model_name, config, files)
    _control("load", name, config=text or None, files=files)


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unload a model; its requests in flight finish. With `unload_dependents` also the models that an ensemble loaded.

    Raises `TritonModelException` if the server does not allow it.
    """
    name = as_text(model_name)
    if name is None or not is_truth(unload_dependents):
        raise incompatible_arguments("unload_model", _UNLOAD, model_name, unload_dependents)
    _control("unload", name, unload_dependents=bool(unload_dependents))


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Return whether a model can execute requests; without a version, whether any version can."""
    name, version = as_text(model_name), as_text(model_version)
    if name is None or version is None:
        raise incompatible_arguments("is_model_ready", _READY, model_name, model_version)
    return _control("ready", name, version=version)


def _control(
    action: str,
    model_name: str,
    *,
    version: str = "",
    config: str | None = None,
    files: Mapping[str, bytes] | None = None,
    unload_dependents: bool = False,
) -> bool:
    instance = current_instance()
    try:
        return instance.host.calls.control(
            action, model_name, version=version, config=config, files=files, unload_dependents=unload_dependents
        )
    except ServingError as error:
        raise TritonModelException(
            f"{_FAILURES[action]}: Failed to process the request for model '{instance.name}', message: {error.message}"
        ) from None
