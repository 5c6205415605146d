"""docs/metrics.md against the page that the server shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.load import from_pbtxt
from kernel.observe.metrics_config import DEFAULT_BUCKETS, MetricsConfig, buckets_of
from protocols.http.metrics import model_families
from protocols.http.metrics.model_families import render_models
from tests.docs.documents import code_blocks, code_spans, document, section, table
from tests.docs.metrics_page import kinds, language_kinds, shown_page

if TYPE_CHECKING:
    import pytest


def stated(text: str) -> dict[str, str]:
    """Return the kinds of the families in a table of the page, by their names."""
    return {code_spans(name)[0]: kind for name, kind, _ in table(text)}


def test_the_tables_have_every_family_and_no_other() -> None:
    page = document("docs/metrics.md")
    triton, _, cache = section(page, "Families of Triton").partition("Only for servers with a [response cache]")
    ours = stated(section(page, "Families that Triton does not have"))
    assert stated(triton) | ours == kinds(shown_page(cache=False))
    assert stated(cache) == kinds(shown_page(cache=True))
    assert stated(section(page, "Families of language models")) == language_kinds()
    assert all(name.startswith("nv_") for name in stated(triton))
    assert all(name.startswith("naiad_") for name in ours)


def test_a_family_that_is_added_by_the_recipe_is_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    added = type(model_families.OURS[0])("nv_added", "Added by a test", lambda model: 1)
    monkeypatch.setattr(model_families, "OURS", (*model_families.OURS, added))
    assert "# HELP nv_added Added by a test" in render_models([], MetricsConfig(), 0)


def test_the_buckets_of_the_example_are_taken() -> None:
    [block] = code_blocks(document("docs/metrics.md"), "pbtxt")
    buckets, complaints = buckets_of(from_pbtxt(block.text.encode(), "docs/metrics.md"))
    assert complaints == []
    assert buckets != buckets_of(ModelConfig())[0] == DEFAULT_BUCKETS
