"""The metric that says which model versions can execute, also for models that never loaded: others have no series."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.serving.catalog import ModelState
from protocols.http.metrics.text import label_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.serving.catalog import IndexItem

_NAME = "naiad_model_ready"


def render_readiness(wanted: Iterable[IndexItem]) -> list[str]:
    """Return the lines of the family. `wanted` is `Catalog.wanted()`.

    The label `version` is empty for a model of which no version is known. Models of several repositories that have the
    same name are one series, which is 1 if all of them can execute.
    """
    found: dict[tuple[str, str], int] = {}
    for item in wanted:
        key = item.name, item.version
        found[key] = min(found.get(key, 1), int(item.state == ModelState.READY.value))
    return [
        f"# HELP {_NAME} 1 if the model version can execute now, 0 if it should and cannot",
        f"# TYPE {_NAME} gauge",
        *(
            f"{_NAME}{{{label_text({'model': name, 'version': version})}}} {ready}"
            for (name, version), ready in found.items()
        ),
    ]
