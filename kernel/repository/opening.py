"""Opens the folder of a model for its load: lets its repository agents act, and reads its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import msgspec

from kernel.config.gpus import may_use_gpus
from kernel.file_threads import in_file_thread
from kernel.repository.agents import ModelAgents
from kernel.repository.layout import overriding_folder
from kernel.repository.local import list_repository
from kernel.repository.source import ModelSource

if TYPE_CHECKING:
    from kernel.config.generated.model_config_pb2 import ModelConfig
    from kernel.config.gpus import UsableGpus
    from kernel.repository.clouds.copies import Copy
    from kernel.repository.gpus import ServerGpus
    from kernel.repository.layout import ModelFolder
    from kernel.repository.repositories import Repositories
    from kernel.repository.settings import LifecycleSettings


class OpenedModel(msgspec.Struct, eq=False):
    """A model that is about to be loaded. The load runs within it, as a context manager."""

    #: Of the folder that the agents have chosen, or of the one in the repository.
    source: ModelSource
    #: Before a worker completes it.
    config: ModelConfig
    agents: ModelAgents
    #: Of a model in a cloud: the copy of its folder. The load ends its first use.
    copy: Copy | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self.agents.__aexit__(*error)
        finally:
            if self.copy is not None:
                await in_file_thread(self.copy.release)


async def open_model(
    folder: ModelFolder,
    override: str | None,
    settings: LifecycleSettings,
    copies: Repositories,
    *,
    files_of_request: bool = False,
) -> OpenedModel:
    """Return the model in `folder`; `override` is its configuration if it is not the folder's.

    `copies` copies a model that is in a cloud. `files_of_request` says that the files came with a load request.

    Raises `ServingError`; then its agents have ended, and its copy is not used.
    """
    copy: Copy | None = None
    if not files_of_request:
        folder, copy = await copies.copied(folder)
    try:
        gpus = settings.gpus.settings.at_first
        source = _source(folder, settings, files_of_request, gpus, path="" if copy is None else copy.path)
        opened = await _opened(source, override, settings, files_of_request)
    except BaseException:
        if copy is not None:
            await in_file_thread(copy.release)
        raise
    opened.copy = copy
    return opened


async def _opened(
    source: ModelSource, override: str | None, settings: LifecycleSettings, files_of_request: bool
) -> OpenedModel:
    folder, path_before = source.folder, str(source.path)
    await look_for_gpus(source, override, settings.gpus)
    agents = ModelAgents(folder.name)
    config = await in_file_thread(_read_unless_agents, source, override)
    if not config.model_repository_agents.agents:
        return OpenedModel(source, config, agents)
    path = await agents.load(config, path_before, settings.load_timeout_s)
    try:
        if path != path_before:
            gpus = source.gpus if source.gpus.on_cpu else await settings.gpus.usable()
            source, config = await in_file_thread(_reopened, folder, path, override, settings, files_of_request, gpus)
        else:
            config = await in_file_thread(source.check, config)
    except BaseException:
        await agents.failed()
        raise
    return OpenedModel(source, config, agents)


async def look_for_gpus(source: ModelSource, override: str | None, gpus: ServerGpus) -> None:
    """Let the source know the GPUs of the server, if it depends on them where the model's instances run."""
    if not gpus.possible or gpus.settings.on_cpu:
        return
    config = await in_file_thread(source.parse, override)
    if may_use_gpus(config):
        source.gpus = await gpus.usable()


def _source(
    folder: ModelFolder,
    settings: LifecycleSettings,
    files_of_request: bool,
    gpus: UsableGpus,
    path: str = "",
) -> ModelSource:
    return ModelSource(
        folder, gpus=gpus, auto_complete=settings.auto_complete,
        config_name=settings.config_name, files_of_request=files_of_request, path=path,
    )  # fmt: skip


def _read_unless_agents(source: ModelSource, override: str | None) -> ModelConfig:
    """Return the checked configuration, or as it is written if agents may still change it. Blocks."""
    config = source.parse(override)
    return config if config.model_repository_agents.agents else source.check(config)


def _reopened(
    folder: ModelFolder,
    path: str,
    override: str | None,
    settings: LifecycleSettings,
    files_of_request: bool,
    gpus: UsableGpus,
) -> tuple[ModelSource, ModelConfig]:
    """Return the model in the folder that its agents have chosen. Blocks."""
    moved = overriding_folder(folder.name, path, list_repository(path))
    source = _source(msgspec.structs.replace(moved, namespace=folder.namespace), settings, files_of_request, gpus)
    return source, source.read(override)
