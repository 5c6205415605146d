"""Errors about inputs of an ensemble that only a worker of a step can find: BYTES that do not fit their shape. Pure.

Triton checks BYTES when the request to the ensemble comes, so its errors name the ensemble and its input. Here a worker
checks them, because the kernel does not read tensors, and its error names the step's model and input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.errors import InvalidRequest

if TYPE_CHECKING:
    from kernel.config.ensemble_spec import EnsembleStep
    from kernel.config.spec import ModelSpec
    from kernel.errors import ServingError


class WrongEnsembleInput(InvalidRequest):
    """An input of the request to the ensemble is wrong."""


def about_ensemble(error: ServingError, step: EnsembleStep, ensemble: ModelSpec) -> ServingError:
    """Return the error of a step as one about the ensemble's input, if it is about what the step reads of that.

    The text is Triton's (`backends/worker/strings_check.py`). Any other error is returned as it is.
    """
    if error.before_queueing:
        for name, tensor in step.inputs.items():
            found = _title(name, step.model_name)
            if tensor in ensemble.inputs and found in error.message:
                return WrongEnsembleInput(error.message.replace(found, _title(tensor, ensemble.name), 1))
    return error


def _title(tensor: str, model: str) -> str:
    return f"for inference input '{tensor}' for model '{model}'"
