"""Which model versions can execute, as a metric."""

from __future__ import annotations

from kernel.serving.catalog import IndexItem
from protocols.http.metrics.readiness import render_readiness


def test_each_version_is_one_or_zero() -> None:
    items = [IndexItem("a", "1", "READY"), IndexItem("a", "2", "LOADING"), IndexItem("b", "", "UNAVAILABLE", "broken")]
    assert [line for line in render_readiness(items) if not line.startswith("#")] == [
        'naiad_model_ready{model="a",version="1"} 1',
        'naiad_model_ready{model="a",version="2"} 0',
        'naiad_model_ready{model="b",version=""} 0',
    ]


def test_models_of_one_name_are_one_series_that_is_one_if_all_can_execute() -> None:
    items = [
        IndexItem("a", "1", "READY"),
        IndexItem("a", "1", "UNAVAILABLE", "it failed"),
        IndexItem("a", "1", "READY"),
    ]
    assert render_readiness(items)[2:] == ['naiad_model_ready{model="a",version="1"} 0']
