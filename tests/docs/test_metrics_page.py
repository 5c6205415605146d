"""docs/metrics.md against the page that the server shows."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.load import from_pbtxt
from kernel.observe.metrics_config import DEFAULT_BUCKETS, MetricsConfig, buckets_of
from kernel.options import MetricsOptions
from protocols.http.metrics import families
from protocols.http.metrics.families import render_models
from protocols.http.metrics.server_families import ServerMetrics
from protocols.testing import FrontDoorLab
from tests.docs.documents import ROOT, code_blocks, code_spans, document, section, table

if TYPE_CHECKING:
    import pytest

#: Versions of Triton after the one that was recorded have it.
LATER = {"nv_model_load_duration_secs"}

RECORDED = ROOT / "tests" / "protocols" / "http" / "metrics" / "recorded" / "metrics.txt"


def kinds(page: str) -> dict[str, str]:
    """Return the kinds of the families on a page, by their names."""
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))


def shown_page() -> str:
    """Return a page with all families that are always there."""
    kernel = FrontDoorLab().kernel
    kernel.connections["http"] = lambda: 1
    return (
        "\n".join(render_models([], MetricsConfig(), 0)) + "\n" + ServerMetrics(kernel, MetricsOptions(), 0).render(0)
    )


def test_the_table_has_the_families_that_triton_does_not_have() -> None:
    rows = table(section(document("docs/metrics.md"), "Families that Triton does not have"))
    stated = {code_spans(name)[0]: kind for name, kind, _ in rows}
    triton = kinds(RECORDED.read_text()).keys() | LATER
    assert stated == {name: kind for name, kind in kinds(shown_page()).items() if name not in triton}


def test_a_family_that_is_added_by_the_recipe_is_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    added = type(families.OURS[0])("nv_added", "Added by a test", lambda model: 1)
    monkeypatch.setattr(families, "OURS", (*families.OURS, added))
    assert "# HELP nv_added Added by a test" in render_models([], MetricsConfig(), 0)


def test_the_buckets_of_the_example_are_taken() -> None:
    [block] = code_blocks(document("docs/metrics.md"), "pbtxt")
    buckets, complaints = buckets_of(from_pbtxt(block.text.encode(), "docs/metrics.md"))
    assert complaints == []
    assert buckets != buckets_of(ModelConfig())[0] == DEFAULT_BUCKETS
