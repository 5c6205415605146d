"""Counts and durations of the text that models generate over OpenAI's API: tokens, first tokens, streams. Pure.

The families have vLLM's names where they mean the same, with vLLM's buckets, so that its dashboards show both. A token
is what the model counts as one (`num_output_tokens`); of a model that does not say it, each response with text is one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.observe.custom_metrics import CustomMetrics, CustomSeries
from kernel.observe.histogram import Histogram
from kernel.observe.metric_rules import MetricKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kernel.observe.metric_rules import Labels

#: The bounds of vLLM's histograms, in seconds (`vllm/v1/metrics/loggers.py`).
FIRST_TOKEN_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
PER_TOKEN_BOUNDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BOUNDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip

_NS_PER_S = 1_000_000_000


class GenerationStatistics:
    """The counters of one model version. Durations are observed in nanoseconds."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        #: Streams whose last event was not sent yet.
        self.open_streams = 0
        #: Requests whose client has left before they had ended, streams and others.
        self.cancelled = 0
        #: How often a text began like a call of a tool and was none.
        self.tool_failures = 0
        #: From the client's request to the first token of each choice.
        self.first_token = Histogram(FIRST_TOKEN_BOUNDS, _NS_PER_S)
        #: Between two responses with tokens of one choice.
        self.inter_token = Histogram(PER_TOKEN_BOUNDS, _NS_PER_S)
        #: From the first token of a choice to its last, by the tokens after the first.
        self.per_token = Histogram(PER_TOKEN_BOUNDS, _NS_PER_S)
        #: From the client's request to the end of each choice.
        self.durations = Histogram(REQUEST_BOUNDS, _NS_PER_S)

    def observe_pauses(self, first_ns: int, count: int) -> None:
        """`count` responses with tokens of one choice were taken together, `first_ns` after those before."""
        inter_token = self.inter_token
        inter_token.observe(first_ns)
        inter_token.counts[0] += count - 1  # those behind the first have come without a pause


_COUNTER, _GAUGE, _HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

#: Name, kind, help text, and the value of `GenerationStatistics` by its attribute.
FAMILIES = (
    ("vllm:prompt_tokens_total", _COUNTER, "Number of tokens of prompts", "prompt_tokens"),
    ("vllm:generation_tokens_total", _COUNTER, "Number of tokens that were generated", "generation_tokens"),
    (
        "vllm:time_to_first_token_seconds",
        _HISTOGRAM,
        "Duration from a client's request to the first token of each choice in seconds",
        "first_token",
    ),
    (
        "vllm:inter_token_latency_seconds",
        _HISTOGRAM,
        "Duration between two responses with tokens of one choice in seconds",
        "inter_token",
    ),
    (
        "vllm:request_time_per_output_token_seconds",
        _HISTOGRAM,
        "Mean duration of each token after the first one of a choice in seconds",
        "per_token",
    ),
    (
        "vllm:e2e_request_latency_seconds",
        _HISTOGRAM,
        "Duration from a client's request to the end of each choice in seconds",
        "durations",
    ),
    ("naiad_openai_open_streams", _GAUGE, "Number of streams over OpenAI's API that have not ended", "open_streams"),
    (
        "naiad_openai_cancelled_requests_total",
        _COUNTER,
        "Number of requests over OpenAI's API whose client has left before they had ended",
        "cancelled",
    ),
    (
        "naiad_openai_tool_parse_failures_total",
        _COUNTER,
        "Number of calls of tools that had begun in a text over OpenAI's API and were none, so that they stay text",
        "tool_failures",
    ),
)


def families_of(
    statistics: Mapping[tuple[str, str], GenerationStatistics],
    models: Iterable[tuple[str, str, Labels, CustomMetrics]],
) -> Iterable[tuple[str, CustomMetrics]]:
    """Yield the families of each model, to be merged with those that models define themselves.

    `models` are name, version, labels and own metrics of the versions that serve. What a model counts itself, as
    NVIDIA's backend for vLLM does, is not counted twice.
    """
    for name, version, labels, own in models:
        found = statistics.get((name, version))
        if found is None:
            continue
        defined = {family for family, _ in own.families}
        metrics = CustomMetrics()
        for family, kind, help_text, attribute in FAMILIES:
            if family in defined:
                continue
            value = getattr(found, attribute)
            series = CustomSeries(histogram=value) if kind is _HISTOGRAM else CustomSeries(value)
            metrics.define(family, help_text, kind).series[labels] = series
        yield name, metrics
