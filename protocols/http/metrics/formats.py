"""The two formats of the metrics page: Prometheus' text format, version 0.0.4, and OpenMetrics made from it. Pure.

Text from operators and models (names, metric tags, labels, help) is escaped: it cannot add a line or a label, nor
control a terminal that shows the page.

OpenMetrics is for scrapers that prefer it, as Prometheus does. The samples have the same names, labels and values in
both, so that a dashboard finds them in either. What differs is their description: a counter of OpenMetrics must have a
name that ends in `_total`, which Triton's have not, so that these are of `unknown` type. Histograms can have
exemplars: examples of traced requests. (https://prometheus.io/docs/specs/om/open_metrics_spec/)
"""

from __future__ import annotations

import functools
import math
import re
from typing import TYPE_CHECKING

from kernel.texts import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kernel.observe.histogram import Exemplar, Histogram

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


def head(name: str, help: str, kind: str) -> list[str]:
    """Return the lines before the series of a family; its `kind` is `counter`, `gauge`, `histogram` or `summary`."""
    return [f"# HELP {name} {help}", f"# TYPE {name} {kind}"]


def histogram_lines(name: str, labels: str, histogram: Histogram) -> list[str]:
    """Return the lines of one series, of which the last ones are the buckets. `labels` may be empty."""
    counts = histogram.cumulative()
    total = number(histogram.sum) if histogram.scale == 1 else histogram.sum / histogram.scale
    braced, before = (f"{{{labels}}}", f"{labels},") if labels else ("", "")
    buckets = [
        f"{name}_bucket{{{before}{bound}}} {count}"
        for bound, count in zip(_bound_labels(histogram.bounds), counts, strict=True)
    ]
    return [f"{name}_count{braced} {counts[-1]}", f"{name}_sum{braced} {total}", *buckets]


@functools.lru_cache(maxsize=128)
def _bound_labels(bounds: tuple[float, ...]) -> list[str]:
    return [f'le="{number(bound)}"' for bound in (*bounds, math.inf)]


#: OpenMetrics' media type, as a value of `Content-Type`.
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_MEDIA_TYPE = "application/openmetrics-text"

#: Each is a name for the text format.
_TEXT = ("text/plain", "text/*", "*/*")

_VERSIONS = ("", "1.0.0", "0.0.1")

_TOTAL = "_total"

_DESCRIPTION = re.compile(r"# (HELP|TYPE) (\S+) ?(.*)")


def prefers_openmetrics(accepts: Iterable[str]) -> bool:
    """Whether the values of `Accept` rank OpenMetrics above the text format (RFC 9110, 12.5.1).

    A scraper that names only the text format, or nothing, gets that one.
    """
    asked = text = 0.0
    for media_range in ",".join(accepts).split(","):
        media_type, *parameters = (part.strip().lower() for part in media_range.split(";"))
        values = {name.strip(): value.strip().strip('"') for name, _, value in (p.partition("=") for p in parameters)}
        try:
            weight = float(values.get("q", "1"))
        except ValueError:
            continue
        if media_type == _MEDIA_TYPE and values.get("version", "") in _VERSIONS:
            asked = max(asked, weight)
        elif media_type in _TEXT:
            text = max(text, weight)
    return 0 < asked >= text


def to_openmetrics(page: bytes) -> bytes:
    """Return a page in Prometheus' text format as OpenMetrics."""
    lines = page.decode().split("\n")
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page.decode(), re.MULTILINE))
    found: list[str] = []
    for line in lines:
        description = _DESCRIPTION.fullmatch(line)
        if description is None:
            if line:
                found.append(line)
            continue
        word, name, text = description.groups()
        kind = kinds.get(name)
        if kind == "counter":
            base = name.removesuffix(_TOTAL)
            if base == name or base in kinds:
                kind = "unknown"
            else:
                name = base
        elif kind == "untyped":
            kind = "unknown"
        text = text.replace('"', '\\"') if word == "HELP" else kind or text
        found.append(f"# {word} {name} {text}")
    return "\n".join((*found, "# EOF\n")).encode()


def exemplar_text(exemplar: Exemplar, histogram: Histogram, offset_ns: int) -> str:
    """Return what follows the line of a bucket; `offset_ns` is the time since the epoch less the monotonic time."""
    at_s = (exemplar.observed_ns + offset_ns) / 1e9
    return f' # {{trace_id="{exemplar.trace_id}"}} {number(exemplar.value / histogram.scale)} {at_s:.3f}'
