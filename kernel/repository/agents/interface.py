"""`RepositoryAgent`: the interface of code that acts around the loading and unloading of models. docs/agents.md.

A model names its agents (`model_repository_agents`). An agent is built in, or of a package with an entry point of the
group `naiad.repository_agents`, whose name is that of the agent and whose object is a subclass of `RepositoryAgent`. It
runs in the server's process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from kernel.repository.override import OverrideFolder


class AgentModel(msgspec.Struct, frozen=True):
    """The model that an agent acts for."""

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
