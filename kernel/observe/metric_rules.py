"""What metrics that models define may be called, and how they may be cut into buckets. Pure.

The rules and texts are those of prometheus-cpp, which Triton uses. Workers refuse what breaks them where the model
can see it, and the kernel refuses it again: so no model can write a line of the page that is not its own.
"""

from __future__ import annotations

import enum
import re
from itertools import pairwise
from typing import TYPE_CHECKING

from kernel.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class MetricKind(enum.Enum):
    """The value is the word behind `# TYPE`."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


#: Labels of a series by name, in the order of their names.
Labels = tuple[tuple[str, str], ...]

#: Labels often come from requests: without a limit clients could fill the memory of the server, and the page.
MAX_SERIES = 10_000
MAX_LABELS_LENGTH = 4096
MAX_BUCKETS = 1000

#: The server's own families. Triton lets models write into them.
RESERVED_PREFIXES = (
    "nv_inference_", "nv_model_", "nv_worker_", "nv_arena_", "nv_server_", "nv_cpu_", "nv_gpu_", "nv_energy_",
    "nv_cache_", "nv_pinned_memory_",
)  # fmt: skip

#: Names that begin with two underscores are Prometheus' own.
_METRIC_NAME = re.compile(r"(?!__)[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")

#: What stands behind a histogram's name in the names of its samples.
_SUFFIXES = ("_count", "_sum", "_bucket")


def check_family_name(name: str) -> None:
    """Raise `InvalidArgument` for what is no name of a metric, or one of the server's own."""
    if not _METRIC_NAME.fullmatch(name):
        raise InvalidArgument("Invalid metric name")
    if name.startswith(RESERVED_PREFIXES):
        raise InvalidArgument("Family name already exists")


def checked_labels(labels: Mapping[str, str], kind: MetricKind) -> Labels:
    """Return `labels` in the order of their names. Raises `InvalidArgument`.

    What UTF-8 cannot carry in values becomes `?`.
    """
    for name in labels:
        if not _LABEL_NAME.fullmatch(name) or (kind is MetricKind.HISTOGRAM and name == "le"):
            raise InvalidArgument("Invalid label name")
    length = sum(len(name) + len(value) for name, value in labels.items())
    if length > MAX_LABELS_LENGTH:
        raise InvalidArgument(f"The labels of a metric have at most {MAX_LABELS_LENGTH} characters, found {length}")
    return tuple(sorted((name, value.encode(errors="replace").decode()) for name, value in labels.items()))


def check_buckets(bounds: Sequence[float]) -> None:
    """Raise `InvalidArgument` unless `bounds` ascend."""
    # A bound that is no number is less than none, and equal to none.
    if any(not lower < upper for lower, upper in pairwise(bounds)) or any(bound != bound for bound in bounds):
        raise InvalidArgument("Bucket Boundaries must be strictly sorted")
    if len(bounds) > MAX_BUCKETS:
        raise InvalidArgument(f"A histogram has at most {MAX_BUCKETS} bucket boundaries, found {len(bounds)}")


def sample_names(name: str, kind: MetricKind) -> list[str]:
    """Return what a family and its samples are called."""
    return [name, *(name + suffix for suffix in _SUFFIXES if kind is MetricKind.HISTOGRAM)]
