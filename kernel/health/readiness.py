"""Whether models are ready, where models have health checks: these are asked, of all models at the same time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kernel.errors import ServingError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kernel.serving.catalog import Catalog
    from kernel.serving.model import Model


async def all_healthy(models: Iterable[Model]) -> bool:
    """Ask each of `models` that has a health check. True if none has one."""
    checked = list(dict.fromkeys(model for model in models if model.health))
    if not checked:  # usual
        return True
    try:
        return all(await asyncio.gather(*(model.health.ready() for model in checked)))
    except ServingError:  # a step was unloaded meanwhile
        return False


def with_steps(catalog: Catalog, model: Model) -> Iterator[Model]:
    """Yield `model`, and if it is an ensemble the models of its steps and of theirs. Raises `ServingError`."""
    yield model
    for step in () if model.spec.ensemble is None else model.spec.ensemble.steps:
        yield from with_steps(catalog, catalog.resolve(step.model_name, step.model_version, step.namespace))
