"""Scores of a model to the outputs of its configuration, as Triton's FIL backend makes them (tl_model.h). Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from kernel.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping

    from backends.fil.forest import ForestSignature
    from backends.fil.settings import FilSettings
    from backends.reshape import TensorShapes
    from shm.arrays import Array

INPUT, OUTPUT, SHAP_OUTPUT = "input__0", "output__0", "treeshap_output"


class OutputRule:
    """How `output__0` is made of the scores of a model."""

    def __init__(self, signature: ForestSignature, settings: FilSettings, width: int | None = None) -> None:
        """`width` is how many numbers the configuration has for a row; None for the usual number."""
        self.is_classifier = signature.is_classifier if settings.is_classifier is None else settings.is_classifier
        self._class_count = signature.class_count
        self._threshold = settings.threshold
        self._gives_scores = not self.is_classifier or settings.predict_proba
        binary = settings.predict_proba and self.is_classifier and signature.class_count == 1
        #: The numbers for each row that can be configured; the first are completed.
        self.widths = (1,) if not self._gives_scores else (2, 1) if binary else (signature.class_count,)
        self.width = self.widths[0] if width is None else width
        self._gives_both = binary and self.width == 2

    def output(self, scores: Array) -> Array:
        """Return FP32 [rows, width] of `scores` [rows, classes]."""
        found: Array
        if self._gives_both:
            found = np.concatenate([1.0 - scores, scores], axis=1, dtype=np.float32)
        elif self._gives_scores:
            found = scores.astype(np.float32, copy=False)
        elif self._class_count == 1:
            found = (scores.astype(np.float32, copy=False) > self._threshold).astype(np.float32)
        else:
            classes = scores.argmax(axis=1)
            # Triton begins with class 0 and a maximum of 0: if no score is positive, it is class 0.
            classes[scores.max(axis=1) <= 0] = 0
            found = classes.astype(np.float32).reshape(-1, 1)
        return found


def shap_width(signature: ForestSignature) -> int:
    """Return how many SHAP values a row has: for each class one for each feature, and the bias."""
    return signature.class_count * (signature.feature_count + 1)


def configured_rule(
    model: str, signature: ForestSignature, settings: FilSettings, specs: Mapping[str, TensorShapes]
) -> OutputRule:
    """Return the rule for the outputs of a configuration. Raises `ServingError` if the model cannot make them."""
    for name, spec in specs.items():
        if name not in (OUTPUT, SHAP_OUTPUT):
            raise InvalidArgument(
                f"output '{name}' of model '{model}' is unknown: models of trees have the outputs '{OUTPUT}' and "
                f"'{SHAP_OUTPUT}'"
            )
        if spec.datatype != "FP32":
            raise InvalidArgument(f"output '{name}' of model '{model}' is {spec.datatype}; expected FP32")
    rule = OutputRule(signature, settings)
    if (output := specs.get(OUTPUT)) is not None:
        width = _width_of(output, rule.width)
        if width not in rule.widths:
            expected = " or ".join(str([each]) for each in sorted(rule.widths))
            raise InvalidArgument(
                f"output '{OUTPUT}' of model '{model}' has dims {_row_dims(output)}; expected {expected}, because "
                f"{_reason(rule, signature)}"
            )
        rule = OutputRule(signature, settings, width)
    shap, wanted = specs.get(SHAP_OUTPUT), shap_width(signature)
    if shap is not None and _width_of(shap, wanted) != wanted:
        raise InvalidArgument(
            f"output '{SHAP_OUTPUT}' of model '{model}' has dims {_row_dims(shap)}; expected "
            f"{[wanted]} or {[signature.class_count, signature.feature_count + 1]}"
        )
    return rule


def _reason(rule: OutputRule, signature: ForestSignature) -> str:
    if rule.widths == (1,):
        return "it has one number for each row"
    return f"it has a number for each of {max(2, signature.class_count)} classes"


def _row_dims(spec: TensorShapes) -> list[int]:
    """Return the dimensions of one row."""
    return list(spec.model_dims if spec.batched else spec.model_dims[1:])


def _width_of(spec: TensorShapes, variable: int) -> int:
    """Return how many numbers a row has; a dimension of any size takes what is needed for `variable`."""
    dims = _row_dims(spec)
    fixed = math.prod(dim for dim in dims if dim != -1)
    return fixed if -1 not in dims or variable % fixed else variable


def client_shape(spec: TensorShapes, row_count: int, width: int) -> list[int]:
    """Return the shape of an output in a response. As in Triton, dimensions of 1 are left out: with dims [1] the
    response has the shape [rows]."""
    dims = [dim for dim in _row_dims(spec) if dim != 1]
    fixed = math.prod(dim for dim in dims if dim != -1)
    free = [dim for dim in dims if dim == -1]
    if len(free) > 1:
        dims = [width]
    return [row_count, *((width // fixed) if dim == -1 else dim for dim in dims)]


def check_input(model: str, signature: ForestSignature, specs: Mapping[str, TensorShapes]) -> TensorShapes:
    """Return the one input of a configuration. Raises `ServingError` if it does not fit the model."""
    if len(specs) != 1:
        raise InvalidArgument(f"model '{model}' has {len(specs)} inputs; a model of trees has one, '{INPUT}'")
    spec = next(iter(specs.values()))
    if spec.datatype not in ("FP32", "FP64"):
        raise Unsupported(f"input '{spec.name}' of model '{model}' is {spec.datatype}; expected FP32 or FP64")
    dims = spec.model_dims
    if len(dims) != (1 if spec.batched else 2) or dims[-1] not in (-1, signature.feature_count):
        expected = [signature.feature_count] if spec.batched else [-1, signature.feature_count]
        raise InvalidArgument(
            f"input '{spec.name}' of model '{model}' has dims {list(dims)}; expected {expected}, because the model has "
            f"{signature.feature_count} features"
        )
    return spec
