"""Examines the models of repositories as a load would, without loading one: what completes, and what is wrong.

Each configuration is completed and checked in a worker, which opens the model's files. Ensembles are checked against
the models of their steps.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import msgspec

from kernel.config.check_steps import check_steps
from kernel.config.gpus import NO_GPUS
from kernel.errors import InvalidArgument, ServingError
from kernel.repository.agents.model_agents import agent_class
from kernel.repository.ensembles import in_order, parts_of
from kernel.repository.limits import refuse_batching_library, refuse_unsupported
from kernel.repository.load_log import hint_for
from kernel.repository.opening import look_for_gpus
from kernel.repository.source import ModelSource
from kernel.repository.warmup import warmup_samples
from kernel.serving.catalog import DUPLICATE_REASON

if TYPE_CHECKING:
    from collections.abc import Collection

    from kernel.authoring.progress import WorkProgress
    from kernel.config.generated.model_config_pb2 import ModelConfig
    from kernel.repository.layout import ModelFolder, RepositoryContents
    from kernel.repository.loading import VersionLoader
    from kernel.repository.source import PreparedConfig


class Examined(msgspec.Struct):
    """What was found out about a model."""

    name: str
    path: str = ""
    versions: list[int] = []
    #: As far as it was completed; None if it could not be read.
    config: ModelConfig | None = None
    #: Whether the model has a config.pbtxt.
    configured: bool = True
    #: Why a server could not load the model, or why its requests would fail; empty if neither is so.
    reason: str = ""
    #: What to do about the reason, if that is known.
    hint: str = ""
    #: What a server would warn of.
    warnings: list[str] = []

    @property
    def valid(self) -> bool:
        return not self.reason


class Examination:
    """The models of a listing, one after the other or several at the same time."""

    def __init__(self, contents: RepositoryContents) -> None:
        """`contents` is what was found in the repositories."""
        self.results: dict[str, Examined] = {}
        #: What is strange about the repositories.
        self.hints = contents.hints
        self._sources: dict[str, ModelSource] = {}
        for name, folder in contents.models.items():
            self.results[name] = self._read(name, folder)
        for name, paths in contents.duplicates.items():
            self.results[name] = Examined(name, ", ".join(paths), reason=DUPLICATE_REASON)

    @property
    def sorted_results(self) -> list[Examined]:
        """The results by name."""
        return [self.results[name] for name in sorted(self.results)]

    def _read(self, name: str, folder: ModelFolder) -> Examined:
        """Read and check what needs no worker. Blocks."""
        source = self._sources[name] = ModelSource(folder, gpus=NO_GPUS, auto_complete=True)
        result = Examined(name, folder.path, configured=folder.config_path() is not None)
        try:
            config = source.read()
            result.config = config
            result.versions = source.versions(config)
            result.warnings = source.warnings(config)
            source.check_label_files(config)
            refuse_batching_library(config, folder.batching_library())
            refuse_unsupported(config)
            for agent in config.model_repository_agents.agents:
                agent_class(agent.name)
        except ServingError as error:
            result.reason = _text(error)
        return result

    async def open_files(self, loader: VersionLoader, progress: WorkProgress, at_once: int) -> None:
        """Complete and check each model in a worker, `at_once` of them at the same time, then the ensembles."""
        limit = asyncio.Semaphore(at_once)

        async def examine(result: Examined) -> None:
            async with limit:
                progress.works_on(result.name)
                if result.valid and not _is_ensemble(result):
                    await self._open(loader, result)
                progress.done()

        async with asyncio.TaskGroup() as tasks:
            for result in self.results.values():
                tasks.create_task(examine(result))
        self._connect()

    def find_hints(self, backends: Collection[str]) -> None:
        """Find what to do about the models that are not valid. `backends` are those of the server. Blocks."""
        for name, source in self._sources.items():
            if reason := self.results[name].reason:
                self.results[name].hint = hint_for(source.folder, reason, backends)

    async def _open(self, loader: VersionLoader, result: Examined) -> None:
        """Examine each version; the last one's configuration is the result's."""
        source, config = self._sources[result.name], result.config
        assert config is not None, "a model without configuration is not valid"
        if loader.gpus.possible:  # the configuration was read as for a server without
            await look_for_gpus(source, None, loader.gpus)
            config = await asyncio.to_thread(source.read)
        for version in result.versions:
            try:
                prepared = await loader.examine(source, config, version)
                result.config = prepared.config
                await asyncio.to_thread(_check_warmup, source, prepared)
            except ServingError as error:
                prefix = f"version {version}: " if len(result.versions) > 1 else ""
                result.reason = prefix + _text(error)
                return

    def _connect(self) -> None:
        """Check ensembles against the models of their steps, those in others first."""
        parts = {
            name: parts_of(result.config)
            for name, result in self.results.items()
            if result.valid and result.config is not None and _is_ensemble(result)
        }
        for name in in_order(parts):
            result = self.results[name]
            assert result.config is not None
            try:
                models = {part: self._part(name, part) for part in parts[name]}
                result.config.model_transaction_policy.decoupled = check_steps(result.config, models)
                result.config = self._sources[name].prepare(result.config).config
            except ServingError as error:
                result.reason = _text(error)

    def _part(self, ensemble: str, name: str) -> ModelConfig:
        """Return the configuration of a step's model. Raises `InvalidArgument` if it is not valid."""
        part = self.results.get(name)
        if part is None:
            raise InvalidArgument(f"ensemble {ensemble} contains models that are not available or ambiguous: {name}")
        if part.reason or part.config is None:
            raise InvalidArgument(f"ensemble '{ensemble}' depends on '{name}' which is not valid: {part.reason}")
        return part.config


def _is_ensemble(result: Examined) -> bool:
    return result.config is not None and result.config.HasField("ensemble_scheduling")


def _check_warmup(source: ModelSource, prepared: PreparedConfig) -> None:
    """Make the requests of the model's warm-up, which only a load sends. Blocks. Raises `ServingError`."""
    config = prepared.config
    if config.model_warmup:
        warmup_samples(config, prepared.spec, source.read_warmup_files(config), random.Random())


def _text(error: ServingError) -> str:
    return f"{error.code.title}: {error.message.strip()}"
