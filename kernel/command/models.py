"""`naiad models`: the models of repositories, and whether a server could load them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import typer

from kernel.authoring.examine import Examination
from kernel.authoring.progress import progress_bar
from kernel.authoring.target import find_target
from kernel.authoring.tool_server import run_tool
from kernel.command.start_messages import table_text
from kernel.config.to_json import to_dict
from kernel.config.to_pbtxt import to_pbtxt
from kernel.errors import ServingError
from kernel.machine import processor_count
from kernel.options import BadOption
from kernel.repository.source import scan

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kernel.authoring.examine import Examined
    from kernel.authoring.tool_server import ToolServer


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
        typer.echo(msgspec.json.format(msgspec.json.encode([_as_dict(each) for each in results]), indent=2).decode())
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
    """Return what is found in `paths`. Without `quick`, workers open the files. Raises `BadOption`."""
    targets = [find_target(path) for path in paths]
    try:
        if len(targets) > 1:
            if wrong := [path for path, target in zip(paths, targets, strict=True) if target.name]:
                raise BadOption(f"'{wrong[0]}' is the folder of one model: give it alone, or repositories only")
            contents = scan(tuple(target.repository for target in targets))
        else:
            contents = targets[0].scan()
    except ServingError as error:
        raise BadOption(error.message) from None
    examination = Examination(contents)
    if quick:
        examination.find_hints(())
        return examination

    async def open_files(server: ToolServer) -> None:
        with progress_bar(len(examination.results)) as progress:
            await examination.open_files(server.lifecycle.loader, progress, at_once=processor_count())
        await asyncio.to_thread(examination.find_hints, server.lifecycle.backends())

    run_tool([target.repository for target in targets], open_files, verbose=verbose)
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
