"""`naiad models`: the models of repositories, and whether a server could load them.

Models are examined as a load would, without loading one: a worker that opens the model's files completes and checks
each configuration, and ensembles are checked against the models of their steps.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import msgspec
import typer

from kernel.config.check_ensemble import check_steps
from kernel.config.gpus import NO_GPUS
from kernel.config.to_text import to_dict, to_pbtxt
from kernel.errors import BadOption, InvalidArgument, ServingError
from kernel.machine import processor_count
from kernel.repository.agents import agent_class
from kernel.repository.ensembles import in_order, parts_of
from kernel.repository.load_failures import hint_for
from kernel.repository.opening import look_for_gpus
from kernel.repository.source import ModelSource, scan
from kernel.repository.unsupported import refuse_batching_library, refuse_unsupported
from kernel.repository.warmup import warmup_samples
from kernel.serving.catalog import DUPLICATE_REASON
from kernel.tools.printing import pretty_json, progress_bar, table_text
from kernel.tools.target import find_target
from kernel.tools.tool_server import run_tool

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from kernel.config.generated.model_config_pb2 import ModelConfig
    from kernel.repository.layout import ModelFolder, RepositoryContents
    from kernel.repository.loading import VersionLoader
    from kernel.repository.source import PreparedConfig
    from kernel.tools.printing import WorkProgress
    from kernel.tools.tool_server import ToolServer


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

    def open_files(self, repositories: Sequence[Path], *, verbose: bool = False) -> None:
        """Complete and check all models in workers, and find what to do about those that are not valid.

        With `verbose` the log goes to standard error. Raises `BadOption` if the server of the workers cannot start.
        """

        async def work(server: ToolServer) -> None:
            with progress_bar(len(self.results)) as progress:
                await self._open_all(server.lifecycle.loader, progress, at_once=processor_count())
            await asyncio.to_thread(self.find_hints, server.lifecycle.backends())

        run_tool(repositories, work, verbose=verbose)

    async def _open_all(self, loader: VersionLoader, progress: WorkProgress, at_once: int) -> None:
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
        """Find what to do about the models that are not valid. `backends` are the server's. Blocks."""
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


def print_models(
    paths: Sequence[Path], *, quick: bool = False, as_json: bool = False, show: str = "", verbose: bool = False
) -> int:
    """Print the table of models, or what else is asked for. Returns 1 if a model could not be loaded, else 0.

    Each path is a repository, or the folder of one model. With `quick` the files of models are not opened. `show` is
    the name of the model whose completed configuration is printed. Raises `BadOption`.
    """
    examination = examine(paths, quick=quick, verbose=verbose)
    results = examination.sorted_results
    if show:
        return _show(examination, show)
    if as_json:
        typer.echo(pretty_json([_as_dict(each) for each in results]))
    else:
        rows = [_row(each) for each in results]
        typer.echo(table_text(("Model", "Versions", "Backend", "Configuration"), rows), nl=False)
        for hint in examination.hints if not results else ():
            typer.echo(f"hint: {hint}", err=True)
        for each in results:
            if each.hint:
                typer.echo(f"hint: model '{each.name}': {each.hint}", err=True)
            for line in each.warnings:
                typer.echo(f"warning: model '{each.name}': {line}", err=True)
    return 0 if all(each.valid for each in results) else 1


def examine(paths: Sequence[Path], *, quick: bool, verbose: bool = False) -> Examination:
    """Return what is found in `paths`. Without `quick`, workers open the files. Raises `BadOption`, `ServingError`."""
    targets = [find_target(path) for path in paths]
    if len(targets) > 1:
        if wrong := [path for path, target in zip(paths, targets, strict=True) if target.name]:
            raise BadOption(f"'{wrong[0]}' is the folder of one model: give it alone, or repositories only")
        contents = scan(tuple(target.repository for target in targets))
    else:
        contents = targets[0].scan()
    examination = Examination(contents)
    if quick:
        examination.find_hints(())
    else:
        examination.open_files([target.repository for target in targets], verbose=verbose)
    return examination


def _row(found: Examined) -> tuple[str, ...]:
    config = found.config
    versions = ", ".join(map(str, found.versions)) or "-"
    backend = "-" if config is None else config.backend or config.platform or "-"
    completed = "" if found.configured else " (no config.pbtxt: completed from the model file)"
    return found.name, versions, backend, f"valid{completed}" if found.valid else found.reason


def _as_dict(found: Examined) -> dict[str, object]:
    return {
        "name": found.name,
        "path": found.path,
        "versions": found.versions,
        "backend": "" if found.config is None else found.config.backend,
        "valid": found.valid,
        "reason": found.reason,
        "hint": found.hint,
        "warnings": found.warnings,
        "config": None if found.config is None else to_dict(found.config),
    }


def _show(examination: Examination, name: str) -> int:
    """Print the completed configuration of one model. Returns 1 if it is not valid. Raises `BadOption`."""
    found = examination.results.get(name)
    if found is None:
        there = ", ".join(sorted(examination.results)) or "none"
        raise BadOption(f"there is no model '{name}'; the models are: {there}")
    if not found.valid or found.config is None:
        typer.echo(f"error: model '{name}': {found.reason}", err=True)
        return 1
    typer.echo(to_pbtxt(found.config), nl=False)
    return 0
