from __future__ import annotations

from kernel.observe.custom_metrics import CustomMetrics, CustomSeries, merged_families
from kernel.observe.generation_statistics import FAMILIES, GenerationStatistics, families_of
from kernel.observe.metric_rules import MetricKind

LABELS = (("model", "opt"), ("version", "1"))


def test_responses_that_come_together_are_one_pause_and_no_others() -> None:
    statistics = GenerationStatistics()
    statistics.observe_pauses(30_000_000, 4)
    assert statistics.inter_token.counts[:3] == [3, 0, 1]
    assert statistics.inter_token.cumulative()[-1] == 4
    assert statistics.inter_token.sum == 30_000_000


def test_every_family_has_a_series_of_each_model_that_generates() -> None:
    statistics = GenerationStatistics()
    statistics.prompt_tokens, statistics.generation_tokens = 7, 3
    models = [("opt", "1", LABELS, CustomMetrics()), ("other", "1", LABELS, CustomMetrics())]
    found = list(families_of({("opt", "1"): statistics, ("gone", "1"): GenerationStatistics()}, models))
    assert [name for name, _ in found] == ["opt"]
    families, left_out = merged_families(found)
    assert left_out == []
    assert {family.name: family.kind for family in families} == {name: kind for name, kind, _, _ in FAMILIES}
    values = {family.name: family.series[LABELS].value for family in families if family.kind is MetricKind.COUNTER}
    assert values == {
        "vllm:prompt_tokens_total": 7,
        "vllm:generation_tokens_total": 3,
        "naiad_openai_cancelled_requests_total": 0,
        "naiad_openai_tool_parse_failures_total": 0,
    }


def test_what_a_model_counts_itself_is_not_counted_twice() -> None:
    own = CustomMetrics()
    own.define("vllm:prompt_tokens_total", "", MetricKind.COUNTER).series[LABELS] = CustomSeries(100)
    statistics = GenerationStatistics()
    statistics.prompt_tokens = 7
    found = families_of({("opt", "1"): statistics}, [("opt", "1", LABELS, own)])
    families, _ = merged_families([("opt", own), *found])
    [prompts] = [family for family in families if family.name == "vllm:prompt_tokens_total"]
    assert {labels: series.value for labels, series in prompts.series.items()} == {LABELS: 100}
    assert len(families) == len(FAMILIES)
