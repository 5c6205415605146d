"""Prometheus' text format, version 0.0.4: names, labels and values as they are written. Pure.

Text of operators (model names, metric tags) can form no other line and no other label than its own.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_NOT_IN_LABEL_NAMES = re.compile(r"[^a-zA-Z0-9_]")


def tag_label(tag: str) -> str:
    """Return the label name of a metric tag: the tag behind an underscore (Triton).

    Other characters than letters, digits and underscores become underscores, and there is one in front: such
    names are not valid in Prometheus, and those that begin with two are its own.
    """
    return "_" + _NOT_IN_LABEL_NAMES.sub("_", tag).lstrip("_")


def label_text(labels: Mapping[str, str]) -> str:
    """Return `name="value"` of each label, by name, as it is written between braces."""
    return ",".join(f'{name}="{escape(value)}"' for name, value in sorted(labels.items()))


def escape(value: str) -> str:
    """Return a label value with what would end it or its line escaped. What UTF-8 cannot carry becomes `?`."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return escaped.encode(errors="replace").decode()


def help_text(text: str) -> str:
    """Return a help text with what would end its line escaped."""
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def number(value: float) -> str:
    """Return a value as Prometheus reads it: `3`, `0.25`, `+Inf`, `NaN`."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))
