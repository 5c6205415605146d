"""The agents of one load of a model: their actions, from the load until the last version of it has ended."""

from __future__ import annotations

import asyncio
import functools
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kernel.config.to_json import to_json
from kernel.errors import InternalError, ServingError
from kernel.extensions import REPOSITORY_AGENTS, extension
from kernel.files.file_threads import in_file_thread
from kernel.repository.agents.action_thread import in_own_thread
from kernel.repository.agents.checksum import ChecksumAgent
from kernel.repository.agents.interface import AgentModel, RepositoryAgent

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from kernel.config.generated.model_config_pb2 import ModelConfig

logger = logging.getLogger(__name__)

BUILT_IN: dict[str, type[RepositoryAgent]] = {"checksum": ChecksumAgent}


#: How long each action after the load may take, in seconds. Then the others follow, although its thread still runs.
ACTION_TIMEOUT_S = 60.0


class ModelAgents:
    """Owned by what loads the model, and used by the versions that were loaded.

    As a context manager it ends the load: with LOAD_COMPLETE, or with LOAD_FAIL if the block raises. After
    LOAD_COMPLETE and the last `release`, the model is unloaded: UNLOAD, UNLOAD_COMPLETE. LOAD and UNLOAD come in the
    order of the configuration, the others in the opposite order.
    """

    def __init__(self, name: str) -> None:
        """`name` is the model's, for the log."""
        self._name = name
        self._agents: list[RepositoryAgent] = []
        #: How many use it: what loads, and each loaded version.
        self._uses = 1
        #: How many of them are versions whose last requests are being finished.
        self._leaving = 0
        self._unloaded = False

    async def load(self, config: ModelConfig, folder: str, limit_s: float) -> str:
        """Do the action LOAD of each agent of `config`; returns the folder to load from.

        Raises `ServingError`, after LOAD_FAIL of those that were called, also if an agent takes longer than `limit_s`
        seconds (0 for no limit). If it is cancelled, LOAD_FAIL comes too. The thread of an agent that hangs goes on.
        """
        path = Path(folder)
        written = msgspec.json.decode(to_json(config))
        try:
            async with asyncio.timeout(limit_s or None):
                for each in config.model_repository_agents.agents:
                    model = AgentModel(config.name or self._name, path, dict(each.parameters), written)
                    path = await in_own_thread(functools.partial(self._load, each.name, model))
        except TimeoutError:
            await self.failed()
            raise InternalError(f"the repository agents were still loading after {limit_s:g} s") from None
        except BaseException:
            await self.failed()
            raise
        return str(path)

    def _load(self, name: str, model: AgentModel) -> Path:
        """Make an agent and call its `load`. Returns the folder for the next one. Blocks; raises `ServingError`."""
        kind = agent_class(name)
        try:
            agent = kind(model)
            self._agents.append(agent)
            chosen = agent.load()
        except ServingError:
            raise
        except Exception as error:
            logger.exception("repository agent '%s' failed to load model '%s'", name, model.name)
            raise InternalError(f"repository agent '{name}': {type(error).__name__}: {error}") from error
        folder = model.folder if chosen is None else Path(chosen)
        if not folder.is_dir():
            raise InternalError(f"repository agent '{name}' has chosen '{folder}', which is not a folder")
        return folder

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            await self.failed()
        elif self._agents:
            await self._all("load_complete", reverse=True)
            await self.release()

    async def failed(self) -> None:
        """End a load that has failed: LOAD_FAIL. No version uses the agents."""
        if self._agents:
            await self._all("load_fail", reverse=True)
            await self._end()

    def retain(self) -> None:
        """A loaded version uses the agents from now on."""
        self._uses += 1

    async def leave(self) -> None:
        """A version is about to be unloaded, and `release` follows. UNLOAD, if it is the last one."""
        self._leaving += 1
        if self._leaving == self._uses:
            await self._unload()

    async def release(self) -> None:
        """End a use, whose workers have ended; the last one is the end of the model."""
        self._uses -= 1
        self._leaving = max(self._leaving - 1, 0)
        if not self._uses and self._agents:
            await self._unload()
            await self._all("unload_complete", reverse=True)
            await self._end()

    async def _unload(self) -> None:
        if not self._unloaded and self._agents:
            self._unloaded = True
            await self._all("unload")

    async def _all(self, action: str, *, reverse: bool = False) -> None:
        """Do an action of all agents, in a thread. Errors are logged."""
        agents = self._agents[::-1] if reverse else list(self._agents)
        for agent in agents:
            try:
                async with asyncio.timeout(ACTION_TIMEOUT_S):
                    await in_own_thread(functools.partial(self._act, getattr(agent, action), action))
            except TimeoutError:
                logger.error(
                    "a repository agent of model '%s' has not finished %s within %g s",
                    self._name, action, ACTION_TIMEOUT_S,
                )  # fmt: skip

    def _act(self, method: Callable[[], None], action: str) -> None:
        try:
            method()
        except Exception:
            logger.exception("a repository agent of model '%s' failed in %s", self._name, action)

    async def _end(self) -> None:
        agents, self._agents = self._agents, []
        for agent in agents:
            await in_file_thread(agent.remove_folder)


def agent_class(name: str) -> type[RepositoryAgent]:
    """Return the repository agent called `name`. Blocks; raises `ServingError` if there is none."""
    kind = BUILT_IN.get(name) or extension(REPOSITORY_AGENTS, name)
    if not (isinstance(kind, type) and issubclass(kind, RepositoryAgent)):
        raise InternalError(f"repository agent '{name}' must be a subclass of RepositoryAgent, got {kind!r}")
    return kind
