"""Rules for the names, labels and buckets of metrics that models define. Pure.

Rules and texts come from prometheus-cpp, which Triton uses. Workers check them, so that the model gets the error.
The kernel checks them again, so that no model can forge lines of the metrics page.
"""

from __future__ import annotations

import enum
import re
from typing import TYPE_CHECKING

from kernel.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class MetricKind(enum.Enum):
    """The kind of a family. The value is the word after `# TYPE`."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


#: The labels of a series, sorted by name: (name, value).
Labels = tuple[tuple[str, str], ...]

#: Labels often come from requests. The limits keep clients from filling the server's memory and the metrics page.
MAX_SERIES = 10_000
MAX_LABELS_LENGTH = 4096
MAX_NAME_LENGTH = 1024
MAX_BUCKETS = 1000

#: The server's own families, in which models cannot define metrics. In Triton they can.
RESERVED_PREFIXES = (
    "nv_inference_", "nv_model_", "nv_cpu_", "nv_gpu_", "nv_energy_", "nv_cache_", "nv_pinned_memory_", "naiad_",
)  # fmt: skip

#: Prometheus reserves names that begin with two underscores.
_METRIC_NAME = re.compile(r"(?!__)[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")

#: Suffixes of the sample names of a histogram.
_SUFFIXES = ("_count", "_sum", "_bucket")


def check_family_name(name: str) -> None:
    """Raise `InvalidArgument` if `name` is not a metric name or belongs to the server's own families."""
    if len(name) > MAX_NAME_LENGTH or not _METRIC_NAME.fullmatch(name):
        raise InvalidArgument("Invalid metric name")
    if name.startswith(RESERVED_PREFIXES):
        raise InvalidArgument("Family name already exists")


def checked_labels(labels: Mapping[str, str], kind: MetricKind) -> Labels:
    """Return `labels` sorted by name. Raises `InvalidArgument`.

    Characters of values that UTF-8 cannot encode become `?`.
    """
    for name in labels:
        if not _LABEL_NAME.fullmatch(name) or (kind is MetricKind.HISTOGRAM and name == "le"):
            raise InvalidArgument("Invalid label name")
    length = sum(len(name) + len(value) for name, value in labels.items())
    if length > MAX_LABELS_LENGTH:
        raise InvalidArgument(f"The labels of a metric have at most {MAX_LABELS_LENGTH} characters, found {length}")
    return tuple(sorted((name, value.encode(errors="replace").decode()) for name, value in labels.items()))


def check_buckets(bounds: Sequence[float]) -> None:
    """Raise `InvalidArgument` if `bounds` are not strictly ascending or too many."""
    # NaN is not less than any bound; a single NaN is found because it does not equal itself.
    if any(not lower < upper for lower, upper in zip(bounds, bounds[1:])) or any(bound != bound for bound in bounds):
        raise InvalidArgument("Bucket Boundaries must be strictly sorted")
    if len(bounds) > MAX_BUCKETS:
        raise InvalidArgument(f"A histogram has at most {MAX_BUCKETS} bucket boundaries, found {len(bounds)}")


def sample_names(name: str, kind: MetricKind) -> list[str]:
    """Return the names of a family and of its samples."""
    return [name, *(name + suffix for suffix in _SUFFIXES if kind is MetricKind.HISTOGRAM)]
