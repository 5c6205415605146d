"""Loads the models of a repository one after the other, measures that, and tries each of them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from kernel.authoring.trial.memory import private_byte_size, workers
from kernel.authoring.trial.trial import Trial, TrialResult, TrialSettings
from kernel.config.gpus import NO_GPUS
from kernel.errors import ServingError
from kernel.repository.composition import parts_by_name
from kernel.repository.ensembles import in_order
from kernel.repository.source import ModelSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.authoring.progress import WorkProgress
    from kernel.authoring.tool_server import ToolServer
    from kernel.repository.layout import ModelFolder, RepositoryContents


class Checked(msgspec.Struct):
    """What was found out about a model."""

    name: str
    #: ok, breaks, differs, varies, refused (see `TrialResult`), crashed (a worker died), or failed (it does not load).
    verdict: str = "ok"
    load_s: float = 0.0
    #: The memory of the model's workers alone, when it was loaded and after the trial.
    loaded_byte_size: int = 0
    tried_byte_size: int = 0
    inputs: str = ""
    request_count: int = 0
    findings: list[str] = []

    @property
    def passed(self) -> bool:
        """Whether nothing was found that an author must repair."""
        return self.verdict in ("ok", "varies", "refused")


class RepositoryCheck:
    """The check of the models in a listing."""

    def __init__(self, contents: RepositoryContents, settings: TrialSettings, slow_load_s: float) -> None:
        self._folders = contents.models
        self._settings = settings
        self._slow_load_s = slow_load_s
        #: In the order of the check.
        self.results: dict[str, Checked] = {}
        #: Model → process ids of its workers.
        self._workers: dict[str, set[int]] = {}

    def order(self) -> list[str]:
        """Return the names of the models, ensembles after those of their steps. Blocks."""
        ensembles = in_order(parts_by_name(self._folders.values(), ""))
        return [name for name in self._folders if name not in ensembles] + ensembles

    async def run(self, server: ToolServer, names: Sequence[str], progress: WorkProgress) -> None:
        """Load all models, so that they can call one another; then try each that is loaded."""
        for name in names:
            progress.works_on(f"load {name}")
            self.results[name] = await self._load(server, name)
            progress.done()
        for name in names:
            progress.works_on(f"try {name}")
            if self.results[name].verdict == "ok":
                await self._try(server, self._folders[name], self.results[name])
            progress.done()

    async def _load(self, server: ToolServer, name: str) -> Checked:
        result, before, began = Checked(name), set(workers()), time.monotonic()
        try:
            await server.kernel.repository.load(name)
        except ServingError as error:
            return Checked(name, "failed", findings=[_reason(error)])
        result.load_s = time.monotonic() - began
        self._workers[name] = set(workers()) - before
        result.loaded_byte_size = self._byte_size(name)
        if result.load_s > self._slow_load_s:
            result.findings.append(f"slow: it took {result.load_s:.1f} s to load")
        return result

    async def _try(self, server: ToolServer, folder: ModelFolder, result: Checked) -> None:
        model = server.kernel.catalog.resolve(result.name)
        try:
            files = ModelSource(folder, gpus=NO_GPUS, auto_complete=True).read_warmup_files(model.config)
            found = await Trial(server.kernel, model.spec, self._settings).run(model.config, files)
        except ServingError as error:  # a warm-up file that has gone
            found = TrialResult("failed", findings=[error.message])
        result.verdict, result.inputs, result.request_count = found.verdict, found.inputs, found.request_count
        result.findings += found.findings
        result.tried_byte_size = self._byte_size(result.name)
        if self._workers[result.name] - workers().keys():
            result.verdict = "crashed"
            result.findings.append("a worker of the model died during the trial; --verbose shows what it printed")

    def _byte_size(self, name: str) -> int:
        return sum(map(private_byte_size, self._workers[name]))


def _reason(error: ServingError) -> str:
    """Return why a model does not load. Clients get only Triton's general text if its configuration is wrong."""
    cause = error.__cause__
    return (cause if isinstance(cause, ServingError) else error).message.strip()
