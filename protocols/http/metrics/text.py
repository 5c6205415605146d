"""Prometheus' text format, version 0.0.4: names, labels and values as they are written. Pure.

Text from operators and models (names, metric tags, labels, help) is escaped: it cannot add a line or a label, nor
control a terminal that shows the page.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from kernel.texts import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

_NOT_IN_LABEL_NAMES = re.compile(r"[^a-zA-Z0-9_]")


def tag_label(tag: str) -> str:
    """Return the label name of a metric tag: the tag behind an underscore (Triton).

    Characters other than letters, digits and underscores become underscores: Prometheus does not allow them. One
    underscore stands in front; names that begin with two are reserved by Prometheus.
    """
    return "_" + _NOT_IN_LABEL_NAMES.sub("_", tag).lstrip("_")


def label_text(labels: Mapping[str, str]) -> str:
    """Return `name="value"` of each label, by name, as it is written between braces."""
    return ",".join(f'{name}="{escape(value)}"' for name, value in sorted(labels.items()))


def escape(value: str) -> str:
    """Return a label value with what would end it or its line escaped, and control characters written out (`\\u001b`).

    What UTF-8 cannot carry becomes `?`.
    """
    escaped = printable(value, keep="\n").replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return escaped.encode(errors="replace").decode()


def help_text(text: str) -> str:
    """Return a help text with what would end its line escaped, and control characters written out."""
    return printable(text, keep="\n").replace("\\", "\\\\").replace("\n", "\\n")


def number(value: float) -> str:
    """Return a value as Prometheus reads it: `3`, `0.25`, `+Inf`, `NaN`."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))
