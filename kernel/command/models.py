"""`naiad models`: lists the models of a repository, and whether their configurations are valid."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from kernel.command.start_messages import table_text
from kernel.errors import ServingError
from kernel.options import BadOption
from kernel.repository.limits import refuse_unsupported
from kernel.repository.source import ModelSource, scan
from kernel.serving.catalog import DUPLICATE_REASON

if TYPE_CHECKING:
    from pathlib import Path


def print_models(repositories: tuple[Path, ...]) -> int:
    """Print the table of models. Returns 1 if a configuration is not valid, else 0.

    It does not open model files; a backend completes or refuses a configuration only when the server loads the model.
    """
    for path in repositories:
        if not path.is_dir():
            raise BadOption(f"model repository '{path}' is not a folder")
    found = scan(repositories)
    rows: list[tuple[str, ...]] = []
    invalid_count = len(found.duplicates)
    for name, folder in found.models.items():
        source = ModelSource(folder, gpu_count=0, auto_complete=True)
        try:
            config = source.read()
            versions = ", ".join(map(str, source.versions(config)))
            source.check_label_files(config)
            refuse_unsupported(config)
        except ServingError as error:
            invalid_count += 1
            rows.append((name, "-", "-", f"{error.code.title}: {error.message}"))
            continue
        completed = "" if folder.config_path() else " (no config.pbtxt: completed from the model file)"
        rows.append((name, versions, config.backend, f"valid{completed}"))
    rows += [(name, "-", "-", DUPLICATE_REASON) for name in found.duplicates]
    typer.echo(table_text(("Model", "Versions", "Backend", "Configuration"), sorted(rows)), nl=False)
    return 1 if invalid_count else 0
