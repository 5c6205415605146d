"""docs/metrics.md against the page that the server shows."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.load import from_pbtxt
from kernel.observe.gpu_figures import GpuFigureReader, GpuFigures
from kernel.observe.metrics_config import DEFAULT_BUCKETS, MetricsConfig, buckets_of
from kernel.options import MetricsOptions
from kernel.repository.gpus import PinnedPool
from kernel.server_parts import DoorFigures, ServerPart
from kernel.serving.interface import CacheFigures
from protocols.http.metrics import model_families
from protocols.http.metrics.memory_families import render_memory
from protocols.http.metrics.model_families import render_models, render_readiness
from protocols.http.metrics.server_families import ServerMetrics, render_cache, render_gpus
from protocols.testing import FrontDoorLab
from tests.docs.documents import code_blocks, code_spans, document, section, table

if TYPE_CHECKING:
    import pytest

#: With all families that settings can enable.
ALL = MetricsConfig(histogram_latencies=True, summary_latencies=True)


def kinds(page: str) -> dict[str, str]:
    """Return the kinds of the families on a page, by their names."""
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))


class _Door(ServerPart):
    def figures(self) -> DoorFigures:
        return DoorFigures("http", 1)


def shown_page(*, cache: bool) -> str:
    """Return a page with all families of a server; with `cache`, only those that its response cache adds."""
    if cache:
        return "\n".join(render_cache([], CacheFigures(byte_size=1), ALL, 0))
    kernel = FrontDoorLab().kernel
    kernel.server_parts.append(_Door())
    server = ServerMetrics(kernel, MetricsOptions(), 0).render(0)
    gpus = GpuFigureReader(None, PinnedPool(1), 1)  # type: ignore[arg-type]  # nobody reads
    gpus.take([GpuFigures("GPU-1")])
    ours = [*render_readiness([]), *render_memory([], {}), *render_gpus(gpus)]
    return "\n".join([*render_models([], ALL, 0), *ours, server])


def stated(text: str) -> dict[str, str]:
    """Return the kinds of the families in a table of the page, by their names."""
    return {code_spans(name)[0]: kind for name, kind, _ in table(text)}


def test_the_tables_have_every_family_and_no_other() -> None:
    page = document("docs/metrics.md")
    triton, _, cache = section(page, "Families of Triton").partition("Only for servers with a [response cache]")
    ours = stated(section(page, "Families that Triton does not have"))
    assert stated(triton) | ours == kinds(shown_page(cache=False))
    assert stated(cache) == kinds(shown_page(cache=True))
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
