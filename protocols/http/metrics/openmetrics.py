"""The metrics page in OpenMetrics, for scrapers that prefer it: Prometheus does. Pure.

The samples have the same names, labels and values as in Prometheus' text format, so that a dashboard finds them in
either. What differs is their description: a counter of OpenMetrics must have a name that ends in `_total`, which those
of Triton have not, so that these are of `unknown` type. Histograms can have exemplars: examples of traced requests.
(https://prometheus.io/docs/specs/om/open_metrics_spec/)
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from protocols.http.metrics.text import number

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.observe.histogram import Exemplar, Histogram

#: Its media type, as a value of `Content-Type`.
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
