"""Loads of what is in the repositories: of all models at the start, and of what has changed at each poll."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from kernel.errors import ServingError
from kernel.files.file_threads import in_file_thread
from kernel.repository.composition import LoadRequest
from kernel.repository.failed_loads import FailedLoads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kernel.loop.clock import Clock
    from kernel.repository.composition import Composition, ModelLoader
    from kernel.repository.layout import ModelFolder
    from kernel.repository.load_progress import LoadProgress
    from kernel.repository.settings import LifecycleSettings
    from kernel.serving.model import Model

logger = logging.getLogger(__name__)


class RepositoryLoads:
    """Loads models together. Nobody asks for one of these loads: the log and the repository index say how they end."""

    def __init__(
        self,
        loader: ModelLoader,
        composition: Composition,
        progress: LoadProgress,
        settings: LifecycleSettings,
        clock: Clock,
        serving: Callable[[str], Iterable[Model]],
    ) -> None:
        """`serving` returns the versions that serve, by the model's identifier."""
        self._loader = loader
        self._composition = composition
        self._progress = progress
        self._settings = settings
        self._clock = clock
        self._serving = serving
        self._failed_loads = FailedLoads(round(settings.poll_s * 1e9))
        #: Identifier → the folder that the model was loaded from; None if a client gave its files. A configuration that
        #: a client gave stays until the folder changes (Triton). The lifecycle changes it.
        self.sources: dict[str, ModelFolder | None] = {}

    async def load_all(self, folders: Iterable[ModelFolder], *, with_parts: bool = False) -> list[str]:
        """Load models at the same time, then ensembles, and return the names of those that failed.

        Without `with_parts` the models of all steps are among `folders`.
        """
        failed: list[str] = []

        async def load(folder: ModelFolder) -> None:
            try:
                await self._loader.load_model(folder, LoadRequest(with_parts=with_parts))
            except ServingError as error:
                failed.append(folder.name)
                self._ended(folder, error)
            else:
                self._ended(folder, None)

        models, ensembles = await self._composition.split(folders, self._settings.config_name)
        async with asyncio.TaskGroup() as tasks:
            for folder in models:
                tasks.create_task(load(folder))
        for folder in ensembles:
            await load(folder)
        return failed

    async def load_changed(self, folders: Iterable[ModelFolder]) -> None:
        """Load what has changed of all models of the repositories, and what failed and is tried again.

        In thousands of models few have changed: the others cost a comparison, in a thread, and no task.
        """
        await self.load_all(await in_file_thread(self._due, list(folders), self._clock.now_ns()))

    def _due(self, folders: Iterable[ModelFolder], now_ns: int) -> list[ModelFolder]:
        return [
            folder
            for folder in folders
            if (self.sources.get(folder.identifier) != folder or self._failed_loads.has(folder.identifier)
                or self._composition.ensembles.find(folder.identifier) is not None)
            and self._failed_loads.is_due(folder, now_ns)
        ]  # fmt: skip

    def _ended(self, folder: ModelFolder, error: ServingError | None) -> None:
        now_ns, failed = self._clock.now_ns(), error is not None
        self._progress.ended(folder.identifier, now_ns, failed=failed)
        self._failed_loads.ended(folder, now_ns, failed=failed)
        cause = error.__cause__ if error is not None and isinstance(error.__cause__, ServingError) else error
        serving = list(self._serving(folder.identifier))
        if serving and failed:
            logger.warning("model '%s' continues to serve with the files that it was loaded from", folder.identifier)
        for model in serving:
            model.reload_error = "" if cause is None else f"{cause.code.title}: {cause.message.rstrip()}"
