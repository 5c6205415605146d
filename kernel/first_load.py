"""Loads the models that a server has from its start, and tells its operator how far that is and what became of it."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from kernel.errors import ServingError
from kernel.repository.override import remove_abandoned_folders

if TYPE_CHECKING:
    from kernel.operator import ServerOperator
    from kernel.options import RepositoryOptions
    from kernel.repository.lifecycle import Lifecycle
    from kernel.serving.kernel import Kernel

logger = logging.getLogger(__name__)

#: The time between two reports of how many models are loaded.
_LOADING_SHOWN_S = 0.25


async def show_loading(lifecycle: Lifecycle, operator: ServerOperator) -> None:
    """Tell the operator how far the loading is, until cancelled."""
    while True:
        await asyncio.sleep(_LOADING_SHOWN_S)
        if (step := lifecycle.loading) is not None:
            operator.models_loading(step)


async def load_first_models(
    kernel: Kernel, lifecycle: Lifecycle, operator: ServerOperator, options: RepositoryOptions
) -> str:
    """Load the models and tell what became of them. Returns why the server cannot start; "" if it can."""
    for folder in await asyncio.to_thread(remove_abandoned_folders):
        logger.info("removed '%s', which a server that was killed has left", folder)
    try:
        failed = await lifecycle.start(options.load_models)
    except ServingError as error:
        failure = creating_server(error)
        if options.exit_on_error:
            return failure
        logger.error("%s", failure)
        kernel.start_failed = True
        return ""
    operator.models_loaded(kernel.catalog)
    if failed and options.exit_on_error:
        logger.info("Waiting for in-flight requests to complete.")  # as at the end of a server that has started
        return (
            f"creating server: Internal - failed to load all models: {', '.join(failed)} "
            f"({operator.advice(kernel.catalog, failed)})"
        )
    return ""


def creating_server(error: ServingError) -> str:
    """Return how tritonserver tells of an error at start."""
    return f"creating server: {error.code.title} - {error.message}"
