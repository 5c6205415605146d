"""Repository agents: code that acts around the loading and unloading of models (docs/agents.md).

`RepositoryAgent` is the interface. A model names its agents (`model_repository_agents`). An agent is built in, or of a
package with an entry point of the group `naiad.repository_agents`, whose name is the agent's and whose object is a
subclass of `RepositoryAgent`. It runs in the server's process, in a thread of its own: an action that never ends keeps
nothing else from its end.

`ChecksumAgent` is built in: a model is loaded only if its files have the digests that its configuration says. Each
parameter is `ALGORITHM:FILE` → the digest in hexadecimal digits. Texts are those of Triton's agent, which knows MD5
only. An attacker can make two files with one MD5 digest: prefer SHA256.

`ModelAgents` are the agents of one load of a model, with their actions until the last version of it has ended.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.config.to_text import to_json
from kernel.errors import InternalError, InvalidArgument, ServingError, Unsupported, failing_as, failure_logged
from kernel.extensions import REPOSITORY_AGENTS, extension
from kernel.file_threads import in_file_thread, in_own_thread
from kernel.regular_files import open_regular
from kernel.repository.override import OverrideFolder

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from kernel.config.generated.model_config_pb2 import ModelConfig

logger = logging.getLogger(__name__)


class AgentModel(msgspec.Struct, frozen=True):
    """The model that an agent acts for."""

    #: The name by which clients know the model.
    name: str
    #: The model's folder: that in the repository, or the one that an agent before this one has returned.
    folder: Path
    #: `parameters` of the agent in the model's configuration.
    parameters: dict[str, str]
    #: The configuration as it is written, in the form of `/config`; nothing is completed or checked yet.
    config: dict[str, Any]


class RepositoryAgent:
    """One agent of one load of a model. Each action is a method, which may block: it is called in a thread.

    They are called in this order: `load`, then `load_complete` or `load_fail`; after the former `unload` and
    `unload_complete`. A model that is loaded again has new agents, whose `load` comes before the `unload` of the
    former ones, because the former versions serve until the new ones can.
    """

    def __init__(self, model: AgentModel) -> None:
        self.model = model
        self._folder: OverrideFolder | None = None

    def load(self) -> Path | None:
        """The model is about to be loaded. Return the folder to load it from instead, or None for `model.folder`.

        An exception fails the load: a `ServingError` with its code and text, any other with the code INTERNAL.
        """

    def load_complete(self) -> None:
        """All versions that are to be served are loaded.

        Errors of this and the following methods are only logged. The server waits a minute for each of them.
        """

    def load_fail(self) -> None:
        """The load has failed, perhaps because of this agent or another one.

        If `load` takes longer than a load may take (--model-load-timeout-secs), or an unload or the end of the server
        has ended the load, this is called while `load` still runs.
        """

    def unload(self) -> None:
        """All versions of this load are about to be unloaded."""

    def unload_complete(self) -> None:
        """The workers of all versions of this load have ended."""

    def new_folder(self) -> Path:
        """Return a new, empty folder for files of the model, always the same one. It is removed after the last action.

        Raises `ServingError` if it cannot be made.
        """
        if self._folder is None:
            self._folder = OverrideFolder({})
        return Path(self._folder.path)

    def remove_folder(self) -> None:
        """Remove what `new_folder` has made. The server calls it."""
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.release()


_ALGORITHMS = {"md5": "MD5", "sha256": "SHA256", "sha512": "SHA512"}


class ChecksumAgent(RepositoryAgent):
    """Compares digests in `load`, and changes nothing."""

    def load(self) -> None:
        """Raises `InvalidArgument` or `Unsupported` for the first file without its digest, or wrong parameter."""
        for key, expected in sorted(self.model.parameters.items()):
            algorithm, colon, name = key.partition(":")
            if not colon:
                raise InvalidArgument(f"failed to parse key: {key}")
            title = _ALGORITHMS.get(algorithm.lower())
            if title is None:
                raise Unsupported(f"Unsupported checksum algorithm: {algorithm}")
            found = _digest(self.model.folder, name, title)
            if found != expected:
                raise InvalidArgument(f"Mismatched {title} hash for file {name}, expect: {expected}, got: {found}")


def _digest(folder: Path, name: str, title: str) -> str:
    try:
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise InvalidArgument(f"file '{name}' of a checksum is outside of the model's folder")
        with open(open_regular(path), "rb") as file:
            return hashlib.file_digest(file, title.lower()).hexdigest()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidArgument(f"failed to open text file for read {name}: {reason}") from error


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
                    path = await in_own_thread("repository agent", self._load, each.name, model)
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

        def failure(error: Exception) -> ServingError:
            logger.error("repository agent '%s' failed to load model '%s'", name, model.name, exc_info=error)
            return InternalError(f"repository agent '{name}': {type(error).__name__}: {error}")

        with failing_as(failure, passes=ServingError):
            agent = kind(model)
            self._agents.append(agent)
            chosen = agent.load()
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
                    await in_own_thread("repository agent", self._act, getattr(agent, action), action)
            except TimeoutError:
                logger.error(
                    "a repository agent of model '%s' has not finished %s within %g s",
                    self._name, action, ACTION_TIMEOUT_S,
                )  # fmt: skip

    def _act(self, method: Callable[[], None], action: str) -> None:
        with failure_logged(logger, "a repository agent of model '%s' failed in %s", self._name, action):
            method()

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
